"""Chat templates in the shape of the real families': the text that Transformers makes of them."""

import json
import time

import pytest
import tiny
import transformers

from weft.inference.tokenizer import Tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
LLAMA = """{{- bos_token }}
{%- if custom_tools is defined %}{%- set tools = custom_tools %}{%- endif %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}
    {%- else %}{%- set date_string = "1" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<h>system</h>\\n\\nToday: " + date_string + "\\n" }}
{%- if tools is not none %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}{%- endif %}
{{- system + "<end>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<h>' + message['role'] + '</h>\\n\\n'+ message['content'] | trim + '<end>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool call at once") }}{%- endif %}
        {{- '<h>assistant</h>' + message.tool_calls[0].function.arguments | tojson + '<end>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<h>assistant</h>\\n\\n' }}{%- endif %}
"""
QWEN = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- "<|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
        {{- '<|im_start|>' + message.role }}
        {% generation %}{{- '\\n' + content + '<|im_end|>' }}{% endgeneration %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""
MISTRAL = """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set loop_messages = messages[1:] %}{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- if not tools is defined or tools is none %}{%- set tools = [] %}{%- endif %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('After the optional system message, roles must alternate user/assistant') }}
    {%- endif %}
    {%- if message["role"] == "user" %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"]|trim + eos_token}}
    {%- else %}{{- raise_exception("Only user and assistant roles are supported") }}{%- endif %}
    {%- if loop.first %}{% continue %}{%- endif %}
{%- endfor %}"""
USER, ANSWER = {"role": "user", "content": " What? "}, {"role": "assistant", "content": "It <b>'é'</b> "}
SYSTEM = {"role": "system", "content": "Be short."}
TOOLS = [
    {"type": "function", "function": {"name": "f", "description": "é <x>", "parameters": {"b": 1, "a": [2, None]}}}
]
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
}


def of_transformers(template):
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.tokenizer(), chat_template=template, **SPECIAL)


@pytest.mark.parametrize("template", [LLAMA, QWEN, MISTRAL], ids=["llama", "qwen", "mistral"])
@pytest.mark.parametrize(
    "messages", [[USER], [SYSTEM, USER], [SYSTEM, USER, ANSWER, USER], [USER, ANSWER], [USER, CALL, USER]]
)
@pytest.mark.parametrize("more", [
    {}, {"add_generation_prompt": True}, {"tools": TOOLS}, {"enable_thinking": False, "add_generation_prompt": True},
    {"continue_final_message": True}, {"date_string": "x"},
])  # fmt: skip
def test_the_text_is_that_of_transformers(template, messages, more):
    more = {"add_generation_prompt": False, **more}

    try:
        expected = of_transformers(template).apply_chat_template(messages, tokenize=False, **more)
    except Exception:
        with pytest.raises(ValueError, match=r"template|continue"):
            Tokenizer(tiny.tokenizer(), SPECIAL, template).chat_text(messages, **more)
    else:
        assert Tokenizer(tiny.tokenizer(), SPECIAL, template).chat_text(messages, **more) == expected


def test_where_templates_are_found(tmp_path):
    tiny.tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings, extra = tmp_path / "tokenizer_config.json", tmp_path / "additional_chat_templates"

    def text(**more):
        return Tokenizer.read(tmp_path).chat_text([USER], **more)

    settings.write_text(json.dumps({"chat_template": "one"}))
    assert text() == text(tools=TOOLS) == "one"
    both = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "two"}]
    settings.write_text(json.dumps({"chat_template": both}))
    assert (text(), text(tools=TOOLS)) == ("two", "tools")
    (tmp_path / "chat_template.jinja").write_text("three")
    assert (text(), text(tools=TOOLS)) == ("three", "tools")
    extra.mkdir()
    (extra / "tool_use.jinja").write_text("of a file")
    assert (text(), text(tools=TOOLS)) == ("three", "of a file")
    settings.write_text(json.dumps({"chat_template": [{"name": "default", "template": 3}]}))
    with pytest.raises(ValueError, match="chat_template is 3"):
        text()


@pytest.mark.parametrize("template, why", [
    ("{{ 'x' * 10**9 }}", "repeats a text"), ("{{ [0] * 99999999 }}", "repeats a text"),
    ("{{ 10**(10**9) }}", "a number of more"),
    ("{{ (2**4000) * (2**4000) }}", "a number of more"), ("{{ 'x'.center(10**15) }}", ""),
    ("{% for i in range(9999) %}{% for i in range(9999) %}{{ 'x' * 999 }}{% endfor %}{% endfor %}", "writes more than"),
    ("{{ ''.__class__.__mro__ }}", "unsafe"), ("{{ messages.append(1) }}", "unsafe"),
])  # fmt: skip
def test_templates_that_would_not_end(template, why):
    begin = time.monotonic()
    with pytest.raises(ValueError, match=f"template refuses these messages: .*{why}"):
        Tokenizer(tiny.tokenizer(), {}, template).chat([USER])
    assert time.monotonic() - begin < 20
