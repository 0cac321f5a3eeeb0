"""Built-in tasks, reasoning-gym and user tasks."""

from __future__ import annotations

import time
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colocated_grpo.environments.base import EnvironmentSetupError
from colocated_grpo.environments.registry import TASKS, build_task
from colocated_grpo.environments.tasks.procedural import evaluate, normal_integer
from tests.support.scores import score_text, score_texts

QUESTIONS = [name for name in TASKS if name != "town_lessons"]  # its items are turns and have no "question"
NAMES = [*QUESTIONS, "reasoning_gym:leg_counting", "reasoning_gym:chain_sum"]


def items(name, count, *, seed=0, split="train", **args):
    return list(islice(build_task(name, args).prompts(seed, split), count))


@pytest.mark.parametrize("name", NAMES)
def test_training_questions_of_any_seed_are_never_held_out(name):
    trained = {item["question"] for seed in (0, 1) for item in items(name, 400, seed=seed)}
    held_out = [item["question"] for item in items(name, 40, seed=2, split="held_out")]
    assert len(set(held_out)) == 40
    assert not trained & set(held_out)


def test_a_small_set_of_questions_is_split_without_overlap_and_held_out_ends():
    args = {"min_digits": 2, "max_digits": 2}
    trained = {item["question"] for item in items("sorting", 2000, **args)}
    held_out = [item["question"] for item in items("sorting", 1000, split="held_out", **args)]
    assert trained | set(held_out) == {f"{number:02}" for number in range(100)}
    assert len(held_out) == len(set(held_out)) == 100 - len(trained)


@pytest.mark.parametrize("name", NAMES)
def test_the_seed_determines_the_questions(name):
    assert items(name, 20, seed=5) == items(name, 20, seed=5)
    assert items(name, 20, seed=5) != items(name, 20, seed=6)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_answer_scores_one_bare_tagged_and_after_thoughts(name):
    task = build_task(name, {})
    for item in islice(task.prompts(0, "train"), 50):
        for completion in (
            item["answer"],
            f"so\n<answer> {item['answer']} </answer>.",
            f"<think>1</think>{item['answer']}",
        ):
            assert score_text(task, item, completion).reward == 1.0


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_answer_scores_below_one_without_an_error(name):
    task = build_task(name, {})
    for item in islice(task.prompts(0, "train"), 20):
        for completion in ("", "?", item["answer"] + "0", "<answer></answer>", "</answer><answer>", "\x00\ud800"):
            score = score_text(task, item, completion)
            assert score.error is None
            assert 0 <= score.reward < 1


@pytest.mark.parametrize("name", ["sorting", "reversal"])
def test_partial_credit_grows_with_right_positions_and_can_be_turned_off(name):
    [item] = items(name, 1)
    answer = item["answer"]
    task, strict = build_task(name, {}), build_task(name, {"partial": False})
    scores = [task.score(item, answer[:kept] + "?" * (len(answer) - kept)) for kept in range(len(answer) + 1)]
    assert scores == [0.5 * kept / len(answer) for kept in range(len(answer))] + [1.0]
    assert task.score(item, answer + "x") < 0.5
    assert strict.score(item, answer[:-1]) == 0.0
    assert strict.score(item, answer) == 1.0


def test_sorting_prompts_have_the_configured_lengths():
    lengths = {len(item["question"]) for item in items("sorting", 300)}
    assert lengths == {4, 5, 6, 7, 8}
    [item] = items("sorting", 1, template="{question}>")
    assert item["prompt"] == item["question"] + ">"


def test_arithmetic_answers_agree_with_python():
    args = {"operators": ["+", "-", "*", "/"], "max_digits": 4}
    for item in items("arithmetic", 500, **args):
        assert eval(item["question"].replace("/", "//")) == int(item["answer"])
        if "/" in item["question"]:
            left, right = map(int, item["question"].split("/"))
            assert left % right == 0


@given(st.integers(), st.sampled_from(["{}", "+{}", "{:,}"]))
def test_every_form_of_an_integer_is_normalized(number, form):
    text = form.format(number) if number >= 0 else str(number)
    assert normal_integer(text) == str(number)


def test_zero_has_no_sign_and_other_text_is_not_an_integer():
    assert normal_integer("-000") == normal_integer("0") == "0"
    for text in ("", "-", "1.5", "1e9", "--1", "0x1", "\u0663"):
        assert normal_integer(text) is None


def test_every_countdown_question_has_a_solution():
    task = build_task("countdown", {})
    for item in islice(task.prompts(3, "train"), 200):
        value, used = evaluate(item["answer"])
        assert value == item["target"]
        assert sorted(used) == sorted(item["numbers"])


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("(3+5)*2", 1.0),
        ("2 * (5 + 3) = 16", 1.0),
        ("<answer>3+5+2</answer>", 0.1),
        ("(3+5)*2*1", 0.0),
        ("8*2", 0.0),
        ("(3+5)*2+5-5", 0.0),
        ("3+5*2+", 0.0),
        ("3/(5-5)*2", 0.0),
        ("(3+5)**2", 0.0),
        ("(3+5)//2", 0.0),
        ("-3+5*2", 0.0),
        ("(3+5)*2.0", 0.0),
        ("__import__('os')", 0.0),
        ("[3,5,2]", 0.0),
    ],
)
def test_countdown_accepts_each_number_once_and_only_four_operators(completion, reward):
    item = {"numbers": [2, 3, 5], "target": 16}
    assert build_task("countdown", {}).score(item, completion)["reward"] == reward


def test_countdown_division_is_exact():
    item = {"numbers": [3, 7, 21], "target": 9}
    assert build_task("countdown", {}).score(item, "21/7*3")["reward"] == 1.0
    assert evaluate("1/3*3") == (1, [1, 3, 3])


HOSTILE = [
    "9**9**9**9",
    "9" * 100_000,
    "0" * 200_000 + "x",
    "(" * 5_000 + "1" + ")" * 5_000,
    "(" * 99 + "1" + ")" * 99,
    "1e1000000000",
    "<answer>" * 50_000,
    "</answer>" * 50_000,
    " " * 200_000,
    "1+" * 100_000 + "1",
    "9*" * 99 + "9",
]


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("completion", HOSTILE, ids=lambda text: text[:8])
def test_a_hostile_completion_costs_no_time_and_no_reward(name, completion):
    [item] = items(name, 1)
    start = time.process_time()
    score = score_text(build_task(name, {}), item, completion)
    assert time.process_time() - start < 5.0  # quadratic time takes minutes
    assert score.error is None
    assert score.reward < 0.2


@given(st.text(alphabet="0123456789+-*/() ", max_size=60))
def test_countdown_values_agree_with_python(expression):
    value, _ = evaluate(expression)
    if value is not None:
        assert float(value) == pytest.approx(eval(expression))


SAMPLE = ["arc_1d", "base_conversion", "color_cube_rotation", "graph_color", "list_functions", "number_sorting"]
SAMPLE += [
    "basic_arithmetic",
    "propositional_logic",
    "simple_equations",
    "spell_backward",
    "word_ladder",
    "gsm_symbolic",
]


@pytest.mark.parametrize("dataset", SAMPLE)
def test_reasoning_gym_datasets_are_deterministic_and_accept_their_reference_answer(dataset):
    task = build_task(f"reasoning_gym:{dataset}", {})
    some = list(islice(task.prompts(1, "train"), 4))
    assert some == items(f"reasoning_gym:{dataset}", 4, seed=1)
    for item in some:
        assert item["prompt"].startswith(item["question"].strip()[:10])
        if item["answer"] is not None:
            assert score_text(task, item, f"<answer>{item['answer']}</answer>").reward == 1.0


def test_every_reasoning_gym_dataset_builds():
    from reasoning_gym.factory import DATASETS

    built = {name for name in DATASETS if name != "composite" and build_task(f"reasoning_gym:{name}", {})}
    assert len(built) > 100
    specs = [{"name": "leg_counting", "weight": 2}, {"name": "chain_sum"}]
    task = build_task("reasoning_gym:composite", {"datasets": specs})
    some = list(islice(task.prompts(0, "train"), 30))
    assert {item["metadata"]["source_dataset"] for item in some} == {"leg_counting", "chain_sum"}
    assert all(task.score(item, item["answer"]) == 1.0 for item in some)


def test_answers_that_a_reasoning_gym_scorer_cannot_read_get_no_credit_and_a_broken_scorer_shows(monkeypatch):
    task = build_task("reasoning_gym:prime_factorization", {})
    [item] = items("reasoning_gym:prime_factorization", 1)
    unread = score_texts(task, item, ["two times three", "<answer>2 x 3 x</answer>"])
    assert [one.reward for one in unread] == [0.0, 0.0]
    assert all(one.error.startswith("AnswerError: ValueError: invalid literal") for one in unread)
    assert score_text(task, item, item["answer"]).reward == 1.0
    monkeypatch.setattr(task.judge, "score_answer", lambda answer, entry: entry["no such key"])
    [broken] = score_texts(task, item, ["7"])
    assert broken.failed
    assert broken.error.startswith("KeyError: 'no such key'")


def test_one_answer_on_which_a_task_raises_has_no_credit_if_the_task_scores_another():
    class Reader:
        def score(self, item, completion):
            return float(completion)

    assert [one.reward for one in score_texts(Reader(), {}, ["0.5", "half"])] == [0.5, 0.0]
    assert [one.reward for one in score_texts(Reader(), {}, ["a half", "half"])] == [None, None]


def test_reasoning_gym_args_reach_its_config_and_an_empty_instruction_adds_nothing():
    args = {"min_terms": 2, "max_terms": 2, "instruction": ""}
    for item in items("reasoning_gym:chain_sum", 10, **args):
        assert item["prompt"] == item["question"]
        assert item["metadata"]["num_terms"] == 2


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("sortin", {}, "unknown task 'sortin'; did you mean 'sorting'? valid: arithmetic, countdown"),
        (
            "sorting",
            {"digits": 3},
            "unknown argument 'digits'; did you mean 'min_digits'? valid: max_digits, min_digits",
        ),
        ("sorting", {"min_digits": 9}, "min_digits=9 is above max_digits=8"),
        ("sorting", {"min_digits": "many"}, "args.min_digits='many'"),
        ("sorting", {"template": "sort this"}, "args.template='sort this'"),
        ("arithmetic", {"operators": ["%"]}, "args.operators.0='%'"),
        ("reasoning_gym:leg_count", {}, "did you mean 'leg_counting'?"),
        ("reasoning_gym:chain_sum", {"min_term": 2}, "unexpected keyword argument 'min_term'"),
        ("reasoning_gym:chain_sum", {"seed": 2}, "args.seed is set by the run"),
        ("reasoning_gym:composite", {}, "Must specify at least one dataset"),
        ("no_such_module:Task", {}, "cannot import 'no_such_module'"),
        ("no/such/file.py:Task", {}, "no such file"),
        ("math:tua", {}, "unknown object of 'math' 'tua'; did you mean 'tan'? valid: acos"),
        ("math:tau", {}, "not a task, it has no prompts() and no score()"),
        (":Task", {}, "not of the form module:object"),
    ],
)
def test_a_task_that_cannot_be_built_raises_one_line(name, args, message):
    with pytest.raises(EnvironmentSetupError) as error:
        build_task(name, args)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_missing_reasoning_gym_names_the_pip_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "reasoning_gym.factory", None)
    with pytest.raises(EnvironmentSetupError, match="pip install reasoning-gym"):
        build_task("reasoning_gym:leg_counting", {})


USER_TASK = """
class Parity:
    def __init__(self, limit=4):
        if limit < 1:
            raise ValueError("limit must be positive")
        self.limit = limit

    def prompts(self, seed, split):
        for number in range(self.limit):
            yield {"prompt": str(number), "even": number % 2 == 0}

    async def score(self, item, completion):
        return float((completion == "even") == item["even"])

class Half:
    def prompts(self, seed, split): ...

parity = Parity(2)
"""


def test_a_class_in_a_file_is_built_with_args_and_an_instance_is_used_directly(tmp_path):
    file = tmp_path / "my_task.py"
    file.write_text(USER_TASK)
    task = build_task(f"{file}:Parity", {"limit": 3})
    assert [item["prompt"] for item in task.prompts(0, "train")] == ["0", "1", "2"]
    assert build_task(f"{file}:parity", {}).limit == 2
    assert type(build_task(f"{file}:parity", {})) is type(task)
    assert score_text(task, {"even": True}, "even").reward == 1.0
    with pytest.raises(EnvironmentSetupError, match="it has no score"):
        build_task(f"{file}:Half", {})
    with pytest.raises(EnvironmentSetupError, match=r"limit must be positive"):
        build_task(f"{file}:Parity", {"limit": 0})
    with pytest.raises(EnvironmentSetupError, match="is an instance, not a class"):
        build_task(f"{file}:parity", {"limit": 1})


class FixedScore:
    """A task whose score() returns or raises `result`."""

    def __init__(self, result):
        self.result = result

    def prompts(self, seed, split):
        return iter(())

    def score(self, item, completion):
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


LINE = FixedScore.score.__code__.co_firstlineno + 2


@pytest.mark.parametrize(
    ("result", "reward", "parts", "error"),
    [
        (True, 1.0, {}, None),
        (None, None, {}, None),
        (float("nan"), None, {}, None),
        ({"reward": 2, "style": 0.5, "off": None}, 2.0, {"style": 0.5}, None),
        ({"reward": None, "style": 0.5}, None, {"style": 0.5}, None),
        ({"style": 0.5}, None, {}, "ValueError: score() returned parts without 'reward': style"),
        (float("inf"), None, {}, "ValueError: a reward must be None or a number up to 1e+30 in size, got inf"),
        ("1", None, {}, "ValueError: a reward must be None or a number up to 1e+30 in size, got '1'"),
        (KeyError("answer"), None, {}, f"KeyError: 'answer' (test_tasks.py, line {LINE})"),
        (RuntimeError("two\nlines"), None, {}, f"RuntimeError: two lines (test_tasks.py, line {LINE})"),
        (SystemExit(3), None, {}, f"SystemExit: 3 (test_tasks.py, line {LINE})"),
        (KeyboardInterrupt(), None, {}, f"KeyboardInterrupt: (test_tasks.py, line {LINE})"),
        ({"reward": 1, ("a", 2): 3, None: 4}, 1.0, {"('a', 2)": 3.0, "None": 4.0}, None),
    ],
)
def test_the_result_of_score_becomes_a_score_or_one_error_line(result, reward, parts, error):
    score = score_text(FixedScore(result), {}, "text")
    assert (score.reward, score.parts, score.error) == (reward, parts, error)
