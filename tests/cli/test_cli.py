"""The command line, run as a user runs it, most of it on a tiny model whose tokens are bytes."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

import labcore.cli.main
from labcore.cli.generate import finite, stream
from labcore.cli.main import main


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> str:
    """A model folder with a tokenizer of 256 bytes and a chat template."""
    from tiny_models import tiny
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny")
    tiny("llama").save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    wrapped.chat_template = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }};{% endfor %}a:"
    wrapped.save_pretrained(folder)
    return str(folder)


def generate(folder: str, *arguments: str) -> int:
    return main(["generate", *arguments, "--model", folder, "--max-model-len", "64", "--num-blocks", "32"])


def the_error(capsys) -> str:
    """What was said on stderr, once it is sure that it is one line of the right form."""
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("labcore: error: "), lines
    return lines[0].removeprefix("labcore: error: ")


# ------------------------------------------------------------------------------------------------------------ the front


def test_help_names_every_command_and_imports_no_torch():
    code = "import sys; from labcore.cli.main import main\ntry: main(['--help'])\nfinally: print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert all(f"\n    {name} " in done.stdout for name in labcore.cli.main.COMMANDS)
    assert not {"torch", "transformers", "triton", "nbformat"} & set(done.stdout.split())


def commands(table=labcore.cli.main.COMMANDS, before=()):
    for name, (home, _) in table.items():
        if isinstance(home, str):
            yield pytest.param([*before, name], home, id=" ".join([*before, name]))
        else:
            yield from commands(home, [*before, name])


@pytest.mark.parametrize(("words", "home"), list(commands()))
def test_every_command_that_is_listed_exists_and_explains_itself(words, home, capsys):
    assert callable(import_module(home).add_parser)
    with pytest.raises(SystemExit) as ended:
        main([*words, "--help"])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: labcore {' '.join(words)} ")


def test_every_module_with_a_parser_is_listed():
    root = Path(labcore.__file__).parent
    written = {
        ".".join(("labcore", *file.relative_to(root).with_suffix("").parts))
        for file in root.rglob("*.py")
        if "\ndef add_parser(" in file.read_text(encoding="utf-8")
    }
    assert written == {param.values[1] for param in commands()}


def test_without_arguments_it_prints_the_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 0
    assert "generate" in capsys.readouterr().out


def test_the_version_is_the_packages(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"labcore {labcore.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["generate"], "required: prompt — see labcore generate --help"),
        (["generate", "Hi", "--max-tokens", "x"], "--max-tokens: 'x' is not a whole number or none"),
        (["generate", "Hi", "--max-num-batched-tokens", "x"], "--max-num-batched-tokens: 'x' is not a whole number or auto"),
        (["generate", "Hi", "--top-p", "x"], "--top-p: 'x' is not a number"),
        (["generate", "Hi", "--attention-backend", "magic"], "--attention-backend: invalid choice: 'magic'"),
        (["generate", "Hi", "--scheduling-policy", "lifo"], "--scheduling-policy: invalid choice: 'lifo'"),
        (["generate", "Hi", "--kv-cache-dtype", "int8"], "unrecognized arguments: --kv-cache-dtype int8"),
        (["generate", "Hi", "--stream", "--json"], "not allowed with"),
        (["bench"], "required: command — see labcore bench --help"),
    ],
)
def test_arguments_that_can_not_be_read_are_one_line_and_exit_2(arguments, says, capsys):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert says in the_error(capsys)


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ValueError("a\n  b"), 2, "a b"),
        (RuntimeError("a b"), 1, "a b"),
        (FileNotFoundError(2, "gone", "x"), 1, "x: gone"),
        (OSError("no room"), 1, "no room"),
        (RuntimeError(), 1, "RuntimeError"),
    ],
)
def test_an_error_of_a_command_is_one_line(error, status, says, capsys, monkeypatch):
    from labcore.doctor import report as doctor

    def fails(_):
        raise error

    monkeypatch.setattr(doctor, "run", fails)
    assert main(["doctor"]) == status
    assert the_error(capsys) == says


def test_a_traceback_is_there_for_the_asking(monkeypatch):
    monkeypatch.setenv("LABCORE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="--stream shows one text"):
        main(["generate", "a", "b", "--stream"])


# ------------------------------------------------------------------------------------------------------------- generate


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["Hi", "--temperature", "nan"], "--temperature is nan"),
        (["Hi", "--temperature", "-1"], "--temperature is -1.0"),
        (["Hi", "--top-p", "1.5"], "--top-p is 1.5"),
        (["Hi", "--max-tokens", "0"], "--max-tokens is 0"),
        (["Hi", "--n", "0"], "--n is 0"),
        (["Hi", "--block-size", "0"], "--block-size is 0"),
        (["Hi", "--max-num-batched-tokens", "auto", "--no-enable-chunked-prefill"], "--max-num-batched-tokens is 'auto'"),
        (["Hi", "--device", "magic"], "device is 'magic'"),
        (["Hi", "there", "--stream"], "--stream shows one text"),
        (["Hi", "--n", "2", "--stream"], "--stream shows one text"),
        (["Hi", "--system", "Be brief."], "--system needs --chat"),
        ([""], "prompt is empty"),
        (["\udcff"], "prompt is '\\udcff'; it must be text that can be written as UTF-8"),
        (["Hi", "--max-num-batched-tokens", "auto", "--tbt-target-ms", "0"], "--tbt-target-ms is 0.0"),
        (["x" * 100], "prompt has 100 tokens"),
    ],
)
def test_bad_input_is_one_line_that_names_it_and_exit_2(arguments, says, tiny_folder, capsys):
    assert generate(tiny_folder, *arguments) == 2
    assert says in the_error(capsys)


def test_a_model_that_is_not_there_is_one_line_and_exit_1(capsys):
    assert main(["generate", "Hi", "--model", "./no/such/folder"]) == 1
    assert "no/such/folder" in the_error(capsys)


def test_it_prints_the_text_that_the_library_gives(tiny_folder, capsys):
    from labcore import LLM, SamplingParams

    assert generate(tiny_folder, "Hello", "--max-tokens", "12") == 0
    llm = LLM(tiny_folder, max_model_len=64, num_blocks=32)
    expected = llm.generate("Hello", SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].text
    assert capsys.readouterr().out == expected + "\n"


def test_a_streamed_text_is_the_same_text(tiny_folder, capsys):
    generate(tiny_folder, "Hello", "--max-tokens", "40")
    whole = capsys.readouterr().out
    assert generate(tiny_folder, "Hello", "--max-tokens", "40", "--stream") == 0
    assert capsys.readouterr().out == whole


def test_a_stream_prints_only_what_is_new_and_at_once(monkeypatch):
    class Engine:
        """Says é€🙂 in nine steps: most of a character's bytes change nothing that may be shown."""

        def add_request(self, *_):
            self.texts = ["", "é", "é", "é", "é€", "é€", "é€", "é€", "é€🙂"]

        def has_unfinished_requests(self):
            return bool(self.texts)

        def step(self):
            return [SimpleNamespace(outputs=[SimpleNamespace(text=self.texts.pop(0))], error=None)]

    happened = []
    screen = SimpleNamespace(write=happened.append, flush=lambda: happened.append("flush"))
    monkeypatch.setattr(sys, "stdout", screen)
    stream(SimpleNamespace(engine=Engine()), [1], None)
    assert [what for what in happened if what] == [
        *("flush", "é", "flush", "flush", "flush", "€", "flush", "flush", "flush", "flush", "🙂", "flush", "\n")
    ]


def test_json_is_one_document_with_what_the_contract_names(tiny_folder, capsys):
    assert generate(tiny_folder, "One", "Two", "--max-tokens", "5", "--n", "2", "--temperature", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert [request["prompt"] for request in report["requests"]] == ["One", "Two"]
    for request in report["requests"]:
        assert {"request_id", "prompt_token_ids", "num_cached_tokens", "outputs", "metrics"} <= request.keys()
        assert [len(output["token_ids"]) for output in request["outputs"]] == [5, 5]
        assert 0 <= request["ttft"] <= request["e2e"]


@pytest.mark.parametrize("how", [[], ["--stream"], ["--json"]])
def test_a_prompt_that_fails_by_itself_is_one_line_and_the_others_are_printed(tiny_folder, capsys, monkeypatch, how):
    from labcore.engine.model_runner import ModelRunner

    whole = ModelRunner.run

    def broken(self, plan, requests):
        caught_up, logits = whole(self, plan, requests)
        logits = logits.clone()
        for row, request in enumerate(caught_up):
            if request.prompt_token_ids == caught_up[-1].prompt_token_ids and len(request.output_token_ids) == 2:
                logits[row] = float("nan")
        return caught_up, logits

    monkeypatch.setattr(ModelRunner, "run", broken)
    prompts = ["Two"] if how == ["--stream"] else ["One", "Two"]
    assert generate(tiny_folder, *prompts, "--max-tokens", "5", "--ignore-eos", *how) == 1
    said = capsys.readouterr()
    assert said.out
    assert said.err == (
        f"labcore: error: prompt {len(prompts)} failed: its logits hold NaN or infinity, so the model's arithmetic broke down\n"
    )
    if how == ["--json"]:
        reasons = [request["outputs"][0]["finish_reason"] for request in json.loads(said.out)["requests"]]
        assert reasons == ["length", "error"]


def test_infinities_become_null_so_that_the_document_is_json():
    assert finite({"a": [float("-inf"), 1.5, None], "b": float("nan")}) == {"a": [None, 1.5, None], "b": None}


def test_chat_puts_the_prompt_and_the_system_message_into_the_template(tiny_folder, capsys):
    assert generate(tiny_folder, "Hi", "--chat", "--system", "Be", "--max-tokens", "1", "--json") == 0
    tokens = json.loads(capsys.readouterr().out)["requests"][0]["prompt_token_ids"]
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(tiny_folder).decode(tokens) == "s:Be;u:Hi;a:"


def test_a_dash_reads_the_prompt_from_standard_input(tiny_folder, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    assert generate(tiny_folder, "-", "--max-tokens", "1", "--json") == 0
    assert json.loads(capsys.readouterr().out)["requests"][0]["prompt"] == "from a pipe"


def test_the_budget_of_a_step_may_be_found_by_the_engine(tiny_folder, capsys):
    assert generate(tiny_folder, "One", "--max-tokens", "2") == 0
    plain = capsys.readouterr().out
    assert generate(tiny_folder, "One", "--max-tokens", "2", "--max-num-batched-tokens", "auto") == 0
    assert capsys.readouterr().out == plain


def test_several_texts_come_under_a_line_that_says_which(tiny_folder, capsys):
    assert generate(tiny_folder, "One", "Two", "--max-tokens", "2") == 0
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("---")] == ["--- One", "--- Two"]


def test_the_same_seed_gives_the_same_text(tiny_folder, capsys):
    texts = []
    for seed in ("7", "7", "8"):
        generate(tiny_folder, "Hello", "--max-tokens", "20", "--temperature", "1", "--seed", seed)
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


# ------------------------------------------------------------------------------------------- as a process, on the shell


def start(folder: str, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "labcore.cli.main", "generate", "Hello", "--model", folder, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send to one process")
def test_control_c_ends_a_stream_cleanly_with_130(smollm2):
    with start(str(smollm2), "--stream", "--max-tokens", "4000", "--ignore-eos") as process:
        assert process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().strip() == "labcore: interrupted"


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGPIPE status")
def test_a_reader_that_goes_away_is_no_error(smollm2):
    with start(str(smollm2), "--stream", "--max-tokens", "4000", "--ignore-eos") as process:
        assert process.stdout.read(5)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_the_real_model_knows_the_capital_of_france(smollm2, capsys):
    assert main(["generate", "The capital of France is", "--model", str(smollm2), "--max-tokens", "4"]) == 0
    assert "Paris" in capsys.readouterr().out


def test_fetch_says_where_the_model_is_and_is_quick_when_it_is_there(smollm2):
    code = "import sys; from labcore.cli.main import main; main(['fetch']); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"smollm2-135m is in {smollm2}", "False"]
