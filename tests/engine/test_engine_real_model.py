"""The real model on real prompts: token for token what transformers' `generate` says, where every stray read shows."""

import pytest
from engines import greedy, poisoned_llm, run

from labcore import LLM, SamplingParams
from labcore.models import load

pytestmark = [pytest.mark.model, pytest.mark.slow]

QUESTIONS = [
    "What is paging?",
    "Say hi.",
    "Name three colors of the rainbow.",
    "Why is the sky blue? Answer in one sentence.",
    "Write a haiku about memory.",
    "What is 12 times 12?",
    "Translate 'good morning' to French.",
    "List the planets of the solar system in order, and say one thing about each of them.",
    "Explain to a child what a library is, why books are lent, and why they have to be brought back in time.",
    "Write a short letter to a landlord who has not repaired the heating, although it was promised twice in October.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes with the amounts of flour, milk and eggs for four people.",
    "Summarize: The cat sat on the mat. The dog came in. The cat left the mat and sat on the dog.",
    "What does a compiler do?",
    "Continue the series: 2, 4, 8, 16,",
    "Tell me a joke about computers.",
]
BEGINNINGS = [
    "Once upon a time",
    "The capital of France is",
    "def fibonacci(n):\n",
    "In 1969, humans first",
    "Water boils at",
    "The three laws of robotics are",
    "To make a good cup of tea, first",
    "Dear Sir or Madam,",
    "import numpy as np\n\n# mean of every column\n",
    "The quick brown fox",
    "A queue is a data structure in which",
    "The history of the city begins in the twelfth century, when merchants from the coast built a small harbour by the "
    "river. For two hundred years it grew slowly. Then, in the year of the great fire,",
    "Q: How many legs does a spider have?\nA:",
    "Naïve café – résumé: 日本語",
    "1, 1, 2, 3, 5, 8,",
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was "
    "the epoch of belief,",
]
MAX_TOKENS = 40


@pytest.fixture(scope="module")
def loaded(smollm2):
    return load(smollm2)


@pytest.fixture(scope="module")
def prompts(loaded):
    chats = [
        loaded.tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=False
        )
        for question in QUESTIONS
    ]
    return chats + [loaded.tokenizer.encode(text) for text in BEGINNINGS]


@pytest.fixture(scope="module")
def expected(loaded, prompts):
    return [greedy(loaded.model, prompt, MAX_TOKENS, ignore_eos=False) for prompt in prompts]


@pytest.mark.parametrize("caching", [True, False], ids=["prefix caching", "no prefix caching"])
@pytest.mark.parametrize("num_blocks", [200, 40], ids=["room for all", "preemption"])
def test_greedy_tokens_equal_those_of_generate(loaded, prompts, expected, num_blocks, caching):
    llm = poisoned_llm(loaded, num_blocks=num_blocks, enable_prefix_caching=caching, seed=num_blocks)
    if num_blocks == 40:
        llm.engine.scheduler.watermark = 0  # admit whoever fits now, so that growth must push somebody out
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(f"r{i}", prompt, SamplingParams(temperature=0, max_tokens=MAX_TOKENS))
    done = run(llm.engine)
    assert (llm.engine.stats()["num_preemptions"] > 0) == (num_blocks == 40)
    for i in range(len(prompts)):
        assert done[f"r{i}"].outputs[0].token_ids == expected[i], f"prompt {i}"


def test_chat_answer_is_text_and_ends_with_the_end_token(loaded):
    llm = LLM(loaded, num_blocks=64)
    (output,) = llm.chat([{"role": "user", "content": "Say hi."}], SamplingParams(temperature=0, max_tokens=64))
    completion = output.outputs[0]
    assert completion.finish_reason == "stop" and completion.token_ids[-1] in loaded.eos_token_ids
    assert completion.text and "<|" not in completion.text


def test_stop_string_ends_the_text_before_it_and_is_never_shown_in_part(loaded):
    llm = LLM(loaded, num_blocks=64)
    prompt = loaded.tokenizer.encode("1, 1, 2, 3, 5, 8,")
    whole = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=24))[0].outputs[0].text
    stop = whole[10:16]
    llm.engine.add_request("r", prompt, SamplingParams(temperature=0, max_tokens=24, stop=stop))
    shown = [output.outputs[0].text for _ in range(24) if llm.engine.has_unfinished_requests() for output in llm.engine.step()]
    assert shown[-1] == whole[: whole.index(stop)]
    assert all(later.startswith(earlier) for earlier, later in zip(shown, shown[1:], strict=False))
    llm.engine.check_integrity()
