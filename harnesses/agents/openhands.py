"""OpenHands SDK: a condenser that sums up the middle of the list, and a helper that a tool starts."""

import json
import os
import subprocess

NAME = "openhands"
API = "chat"
PYTHON = "3.12"
INTEGRATION = "adapter"

os.environ |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"}
from openhands.sdk import Agent, Conversation, LLMSummarizingCondenser, Tool, register_tool
from openhands.sdk.conversation.response_utils import get_agent_final_response
from openhands.sdk.tool import Action, Observation, ToolDefinition, ToolExecutor
from pydantic import Field, SecretStr

# integration begins
from kvtether.adapters.openhands import KVTetherLLM, end

# integration ends


def did(what: str, **told: object) -> None:
    with open(os.environ["HARNESS_TRUTH"], "a") as file:
        file.write(json.dumps({"did": what, **told}) + "\n")


class ShellAction(Action):
    command: str = Field(description="what to run")


class ReadAction(Action):
    path: str = Field(description="which file")


class TaskAction(Action):
    prompt: str = Field(description="what to do")


class Text(Observation):
    """What a tool answers."""


class Shell(ToolExecutor):
    def __call__(self, action: ShellAction, conversation: object = None) -> Text:
        done = subprocess.run(action.command, shell=True, capture_output=True, text=True, timeout=20)
        return Text.from_text(done.stdout)


class Read(ToolExecutor):
    def __call__(self, action: ReadAction, conversation: object = None) -> Text:
        with open(action.path) as file:
            return Text.from_text(file.read())


class Task(ToolExecutor):
    def __call__(self, action: TaskAction, conversation: object = None) -> Text:
        helper = Conversation(
            agent=Agent(llm=llm.model_copy(update={"usage_id": "helper"}), tools=TOOLS),
            workspace=os.getcwd(),
            visualizer=None,
        )
        helper.send_message(action.prompt)
        helper.run()
        answer = get_agent_final_response(helper.state.events)
        helper.close()
        end(helper.id)
        did("close", ctx="helper")
        return Text.from_text(answer)


class ShellTool(ToolDefinition[ShellAction, Text]):
    name = "shell"

    @classmethod
    def create(cls, conv_state: object = None, **_: object) -> list:
        return [cls(description="Run it.", action_type=ShellAction, observation_type=Text, executor=Shell())]


class ReadFileTool(ToolDefinition[ReadAction, Text]):
    name = "read_file"

    @classmethod
    def create(cls, conv_state: object = None, **_: object) -> list:
        return [cls(description="Read it.", action_type=ReadAction, observation_type=Text, executor=Read())]


class TaskTool(ToolDefinition[TaskAction, Text]):
    name = "task"

    @classmethod
    def create(cls, conv_state: object = None, **_: object) -> list:
        return [cls(description="Ask.", action_type=TaskAction, observation_type=Text, executor=Task())]


for name, tool in (("shell", ShellTool), ("read_file", ReadFileTool), ("task", TaskTool)):
    register_tool(name, tool)
TOOLS = [Tool(name="shell"), Tool(name="read_file")]
# integration begins
llm = KVTetherLLM(
    # integration ends
    model=f"openai/{os.environ['HARNESS_MODEL']}",
    base_url=os.environ["OPENAI_BASE_URL"],
    api_key=SecretStr("any"),
    usage_id="agent",
    num_retries=0,
)
condenser = LLMSummarizingCondenser(
    llm=llm.model_copy(update={"usage_id": "condenser"}), max_size=14, keep_first=2
)
main = Conversation(
    agent=Agent(llm=llm, tools=[*TOOLS, Tool(name="task")], condenser=condenser),
    workspace=os.getcwd(),
    visualizer=None,
)
did("context", ctx="main")
for prompt in (os.environ["HARNESS_PROMPT"], os.environ["HARNESS_PROMPT_2"]):
    main.send_message(prompt)
    main.run()
answer = get_agent_final_response(main.state.events)
main.close()
# integration begins
end(main.id)
# integration ends
did("close", ctx="main")
did("done", answer=answer)
