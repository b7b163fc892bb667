"""Role order. Templates render most wrong orders without complaint, so the check is ours."""

from collections.abc import Sequence

from tasks.validation.canonical import Turn
from tasks.validation.reasons import Reason, RowError

FOLLOWS = {
    "user": frozenset({"assistant", "tool", "system", ""}),
    "assistant": frozenset({"user", "tool"}),
    "tool": frozenset({"assistant", "tool"}),
}
"""Which role may come just before; "" is the start."""


def check_order(turns: Sequence[Turn]) -> None:
    """system? (user (assistant (tool+ assistant)*)?)*; raises RowError."""
    roles = [turn[0] for turn in turns]
    if "user" not in roles:
        raise RowError(Reason.NO_USER_TURN, "roles: " + ", ".join(roles[:8]))
    before = ""
    called = False
    for index, (role, content, _, calls, _, _) in enumerate(turns):
        if role == "system":
            if index:
                raise RowError(Reason.BAD_ROLE_ORDER, f"a system turn at position {index}, expected only the first")
        elif before in ("", "system") and role != "user":
            raise RowError(Reason.STARTS_WITH_ASSISTANT, f"the first turn is {role}'s, expected the user's")
        elif before not in FOLLOWS[role]:
            raise RowError(Reason.BAD_ROLE_ORDER, f"{role} after {before} at position {index}")
        elif role == "tool" and not called:
            raise RowError(Reason.BAD_ROLE_ORDER, f"a tool turn at position {index} that no call asked for")
        if role == "user" and (not content or content.isspace()):
            raise RowError(Reason.EMPTY_USER_TURN, f"the user turn at position {index} has no text")
        if role != "tool":
            called = calls is not None
        before = role
