"""A family for a template that no description fits: headers and end of turn are read off probe renderings."""

from collections.abc import Callable

from tasks.errors import TargetError
from tasks.records import Message
from tasks.target.family import Family

_USER, _ANSWER, _AGAIN, _LAST = "Qprobe1Q", "Aprobe2A", "Qprobe3Q", "Aprobe4A"


def infer_family(render: Callable[..., str], template: str, origin: str) -> Family:
    """What stands between probe texts is structure. `origin` says in errors where the template is from.

    Raises TargetError when the template refuses plain turns, or does not write their texts, so that nothing can be
    inferred.
    """
    turns = [Message("user", _USER), Message("assistant", _ANSWER), Message("user", _AGAIN)]
    try:
        prompt = render(turns, add_generation_prompt=True)
        done = render([*turns, Message("assistant", _LAST)], add_generation_prompt=False)
    except ValueError as error:
        raise TargetError(
            f"the chat template {origin} fails to render plain user and assistant turns: {error}; give a working one "
            "as target.chat_template, or describe this one in target.families"
        ) from error
    try:
        start, middle, again = (done.index(text) for text in (_USER, _ANSWER, _AGAIN))
        last = done.index(_LAST)
        asked = prompt.index(_AGAIN)
    except ValueError as error:
        raise TargetError(
            f"no known template family fits the chat template {origin}, and it does not write the texts of plain user "
            f"and assistant turns ({error}); give a working one as target.chat_template, or describe this one in "
            "target.families"
        ) from error
    between = done[middle + len(_ANSWER) : again]
    ending = done[last + len(_LAST) :]
    end_of_turn = _common_start(between, ending) or ending
    user_header = between[len(end_of_turn) :]
    header = prompt[asked + len(_AGAIN) :]
    user_end = done[start + len(_USER) : middle]
    assistant_header = header.removeprefix(_common_start(header, end_of_turn)) if end_of_turn.strip() else header
    thinks = "<think>" in template and "</think>" in template
    return Family(
        "inferred",
        assistant_header=assistant_header.removesuffix("<think>\n") if user_end else assistant_header,
        user_header=user_header,
        end_of_turn=(end_of_turn.strip(),) if end_of_turn.strip() else (),
        think_open="<think>" if thinks else "",
        think_close="</think>" if thinks else "",
    )


def _common_start(left: str, right: str) -> str:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return left[:length]
