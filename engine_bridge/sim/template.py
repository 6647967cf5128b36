"""The chat template of the simulated model: the project's own, so that nothing has to be downloaded.

A turn is `<|turn|>role<|says|>content<|done|>`, and a tool call in it `<|call|>` with one JSON object. All
four marks are single tokens, so a turn's tokens depend on nothing outside of it, and what the model is said
to have generated has the tokens that it has when an agent sends it back.
"""

TURN, SAYS, CALL, DONE = MARKS = ("<|turn|>", "<|says|>", "<|call|>", "<|done|>")
"""Begin of a turn, begin of its content, begin of a tool call, end of a turn."""

TEMPLATE = """\
{%- if tools %}
    {{- '<|turn|>tools<|says|>' }}
    {%- for tool in tools %}
        {{- tool | tojson + '\\n' }}
    {%- endfor %}
    {{- '<|done|>' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|turn|>' + message.role + '<|says|>' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- for call in message.tool_calls %}
            {{- '<|call|>' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|done|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|turn|>assistant<|says|>' }}
{%- endif %}
"""
