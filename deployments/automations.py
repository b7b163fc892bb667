"""Register the automation that ends zombies: runs whose process and worker both died and left them Running for ever.

Run it once against each Prefect server: `python deployments/automations.py`. Running it again updates it in place.
"""

import json
from datetime import timedelta

from prefect.automations import Automation
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.exceptions import ObjectNotFound
from prefect.states import StateType

NAME = "regen: crash zombie runs"

WITHIN = timedelta(seconds=600)
"""At least 540 s. Heartbeats come every 180 s; after a server outage longer than this, live runs would be crashed
falsely (seen: `within` 90 s with an outage of 110 s marked a healthy run CRASHED the second the server was back)."""


def zombie_automation() -> Automation:
    """Crashed, when a run that sent a heartbeat then sends nothing at all for WITHIN."""
    return Automation(
        name=NAME,
        description="A run that stops sending heartbeats is marked Crashed; the next run resumes its data set.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            # Any event of the run counts as life: states are matched by name, and names can be custom.
            expect={"prefect.flow-run.*"},
            match={"prefect.resource.id": ["prefect.flow-run.*"]},  # type: ignore[arg-type]
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=WITHIN,
        ),
        actions=[ChangeFlowRunState(state=StateType.CRASHED, message="No heartbeat: the process and its worker died.")],
    )


def register() -> dict[str, str]:
    """Create or update by name; returns what was done."""
    wanted = zombie_automation()
    try:
        found = Automation.read(name=NAME)
    except (ValueError, ObjectNotFound):
        created = wanted.create()
        return {"automation": NAME, "id": str(created.id), "done": "created"}
    for field in ("description", "trigger", "actions"):
        setattr(found, field, getattr(wanted, field))
    found.update()
    return {"automation": NAME, "id": str(found.id), "done": "updated"}


if __name__ == "__main__":
    print(json.dumps(register()))
