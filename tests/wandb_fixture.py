"""A W&B for the tests: takes the calls that the project makes, and fails as it is told to.

It stands in for the real package where a process finds this text as `wandb.py` on its path; in the test's own process
as well, by `sys.modules`. Its server is a folder, one JSON file a run.
"""

FAKE = """
import json, os, sys, time
from pathlib import Path

FAULT = os.environ.get("FAKE_WANDB_FAULT", "")
SERVER = Path(os.environ["FAKE_WANDB_SERVER"])

class CommError(Exception): ...

def fail(where):
    kind, _, place = FAULT.partition(" at ")
    if place != where:
        return
    if kind == "error":
        raise CommError("the server cannot be reached\\nwith key " + os.environ.get("WANDB_API_KEY", ""))
    if kind == "silence":
        time.sleep(3600)
    if kind == "death":
        os._exit(9)

def Settings(**settings):
    return settings

class Run:
    def __init__(self, id, config, resume, mode):
        self.file = SERVER / (id + ".json")
        known = json.loads(self.file.read_text()) if mode == "online" and self.file.exists() else None
        assert known is None or resume == "allow"
        self.record = known or {"config": config, "mode": mode, "steps": [], "ends": []}
        self.starting_step = len(self.record["steps"])
    def define_metric(self, *_, **__): ...
    def log(self, point, step):
        fail(f"step {step}")
        assert step == len(self.record["steps"]), "W&B would drop this step"
        self.record["steps"].append(point)
        self._save()
    def finish(self, exit_code):
        fail("finish")
        self.record["ends"].append(exit_code)
        self._save()
    def _save(self):
        self.file.write_text(json.dumps(self.record))

def init(*, id, config, resume, mode, **_):
    fail("init")
    return Run(id, config, resume, mode)

fail("import")
"""
