"""mini-swe-agent: one list that only grows, a run a context; its second task is a second run."""

import json
import os

NAME = "mini-swe-agent"
API = "chat"
PYTHON = "3.11"
INTEGRATION = "adapter"

os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": os.environ["HOME"],
    "MSWEA_SILENT_STARTUP": "1",
}
from minisweagent.environments.local import LocalEnvironment

# integration begins
from kvtether.adapters.mini_swe_agent import KVTetherAgent, KVTetherModel

# integration ends

SUBMIT = "When you are done, run `echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT`."


def did(what: str, **told: object) -> None:
    with open(os.environ["HARNESS_TRUTH"], "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


def run(ctx: str, task: str) -> str:
    options = {"api_base": os.environ["OPENAI_BASE_URL"], "extra_headers": {"x-harness-truth": ctx}}
    # integration begins
    model = KVTetherModel(model_name=f"openai/{os.environ['HARNESS_MODEL']}", model_kwargs=options)
    agent = KVTetherAgent(
        # integration ends
        model,
        LocalEnvironment(cwd="."),
        system_template="You work in a directory by running commands.",
        instance_template="{{task}} " + SUBMIT,
    )
    did("context", ctx=ctx)
    agent.run(task)
    did("close", ctx=ctx)
    return next(each["content"] for each in reversed(agent.messages) if each["role"] == "assistant")


run("first", os.environ["HARNESS_PROMPT"])
did("done", answer=run("second", os.environ["HARNESS_PROMPT_2"]))
