"""mini-swe-agent's classes against the installed harness."""

import inspect
import os
import unittest

os.environ |= {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_GLOBAL_CONFIG_DIR": os.environ["HOME"],
    "MSWEA_SILENT_STARTUP": "1",
}
from minisweagent.agents import get_agent_class
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models import get_model_class
from minisweagent.models.litellm_model import LitellmModel
from proxy_view import contexts, eventually, mismatches, operations, run_page

from kvtether import Context
from kvtether.adapters.mini_swe_agent import KVTetherAgent, KVTetherModel

HERE = "kvtether.adapters.mini_swe_agent"


def parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)


def agent(**options: object) -> KVTetherAgent:
    url = {"api_base": os.environ["OPENAI_BASE_URL"], **options}
    templates = {"system_template": "Work.", "instance_template": "{{task}}", "step_limit": 3}
    return KVTetherAgent(
        KVTetherModel(model_name="openai/tiny", model_kwargs=url), LocalEnvironment(), **templates
    )


class TheHook(unittest.TestCase):
    def test_query_is_there_to_be_overridden(self) -> None:
        self.assertEqual(
            parameters(DefaultAgent.query), ["self"], "mini-swe-agent changed DefaultAgent.query"
        )
        self.assertEqual(parameters(DefaultAgent.run), ["self", "task", "kwargs"])
        self.assertEqual(parameters(DefaultAgent.execute_actions), ["self", "message"])
        self.assertEqual(
            parameters(LitellmModel.query), ["self", "messages", "kwargs"], "it changed LitellmModel.query"
        )

    def test_classes_are_found_by_their_names(self) -> None:
        self.assertIs(get_agent_class(f"{HERE}.KVTetherAgent"), KVTetherAgent)
        self.assertEqual(
            get_agent_class(f"{HERE}.KVTetherInteractiveAgent").__name__, "KVTetherInteractiveAgent"
        )
        self.assertIs(get_model_class("openai/tiny", f"{HERE}.KVTetherModel"), KVTetherModel)


class Runs(unittest.TestCase):
    def test_each_run_is_a_context_and_over_with_it(self) -> None:
        for run in ("a", "b"):
            worker = agent()
            worker.run(f"[[task tools#{run}]] Look around.")
            name = worker.kv.name
            eventually(lambda name=name: contexts(name)[name]["closed"])
            self.assertEqual(mismatches(name), 0)
            waits = [each for each in operations(name) if each["op"] == "waiting"]
            self.assertEqual((waits[0]["kind"], waits[0]["tool"]), ("tool", "bash"))

    def test_a_run_inside_a_context_is_its_child(self) -> None:
        with Context("mini-outer").active():
            worker = agent()
            worker.run("[[task talk#c]] Say it.")
        self.assertEqual(worker.kv.parent, "mini-outer")

    def test_headers_and_fields_of_ones_own_stay(self) -> None:
        seen = {}

        class Looking(KVTetherModel):
            def _query(self, messages: list, **kwargs: object) -> object:
                seen.update(kwargs)
                return super()._query(messages, **kwargs)

        worker = agent(extra_headers={"x-mine": "1"})
        worker.model = Looking(**worker.model.config.model_dump())
        worker.run("[[task talk#d]] Say it.")
        self.assertEqual(seen["extra_headers"]["x-mine"], "1")
        self.assertIn("x-kv-lifecycle", seen["extra_headers"])

    def test_the_page(self) -> None:
        name = run_page()["agent"].kv.name
        eventually(lambda: contexts(name)[name]["closed"])
        self.assertEqual(mismatches(name), 0)


if __name__ == "__main__":
    unittest.main()
