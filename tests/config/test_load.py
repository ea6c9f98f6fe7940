"""Files, presets and overrides become one configuration; whatever is wrong is said at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml

from agentrl.config import ConfigError, Problem, RunConfig, load_config

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def problems(source: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> dict[str, Problem]:
    """The problems of a configuration that must be refused, by key."""
    with pytest.raises(ConfigError) as caught:
        load_config(source, overrides)
    return {problem.key: problem for problem in caught.value.problems}


def minimal(**sections: Any) -> dict[str, Any]:
    return {"data": {"train": "tasks.jsonl"}, **sections}


def test_file_and_overrides_fill_the_defaults(write: Write) -> None:
    path = write("run.yaml", "data: {train: tasks.jsonl}\nrollout: {n: 4}\n")
    config = load_config(path, ["actor.optim.lr=1e-5", "rollout.max_concurrent=64", "trainer.experiment_name=first"])
    assert (config.rollout.n, config.rollout.max_concurrent) == (4, 64)
    assert config.actor.optim.lr == 1e-5
    assert config.trainer.experiment_name == "first"
    assert config.actor.clip_ratio_low == 0.2


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "1.0e-6", "0.000001", "+1e-6"])
def test_exponents_without_a_dot_are_numbers(write: Write, text: str) -> None:
    path = write("run.yaml", f"data: {{train: t.jsonl}}\nenv: {{cls: 'a:B', args: {{x: {text}, y: '1e-6'}}}}\n")
    config = load_config(path, [f"actor.optim.lr={text}"])
    assert config.actor.optim.lr == 1e-6
    assert config.env.args == {"x": 1e-6, "y": "1e-6"}, "quoted text stays text"


def test_a_misspelt_key_is_refused_with_the_nearest() -> None:
    found = problems(minimal(rollout={"max_head_offpolicynes": 2}))
    assert found["rollout.max_head_offpolicynes"].fix == "did you mean rollout.max_head_offpolicyness?"


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("async_training.max_head_offpolicyness", "rollout.max_head_offpolicyness"),
        ("trainer.seed", "data.seed"),
        ("actor.lr", "actor.optim.lr"),
        ("val.tempreature", "val.temperature"),
        ("rolout", "rollout"),
        ("max_concurrent", "rollout.max_concurrent"),
        ("actor.rollout_is", "algorithm.rollout_correction.rollout_is"),
        ("actor.optim.warmup_steps", "actor.optim.lr_warmup_steps"),
    ],
)
def test_the_nearest_key_is_found_in_any_section(key: str, nearest: str) -> None:
    assert problems(minimal(), [f"{key}=1"])[key].fix == f"did you mean {nearest}?"


def test_a_key_like_no_other_gets_the_list_of_its_section() -> None:
    fix = problems(minimal(weights={"zzz": 1}))["weights.zzz"].fix
    assert "keys of weights: bucket_mb" in fix


def test_a_dotted_key_in_a_file_is_told_to_nest() -> None:
    assert "actor: {optim: {lr: ...}}" in problems(minimal(**{"actor.optim.lr": 1e-6}))["actor.optim.lr"].fix


def test_all_problems_are_reported_at_once_with_their_places(write: Write) -> None:
    path = write(
        "run.yaml",
        "data:\n  train: tasks.jsonl\n  train_args: {split: a}\n"
        "rollout:\n  n: 8\n  max_concurrent: 4\n  temprature: 0.7\n"
        "actor:\n  optim: {betas: [0.9]}\n",
    )
    found = problems(path, ["trainer.total_steps=eight", "algorithm.adv_estimator=grop"])
    assert found.keys() == {
        "data.train_args",
        "rollout.max_concurrent",
        "rollout.temprature",
        "actor.optim.betas",
        "trainer.total_steps",
        "algorithm.adv_estimator",
    }
    assert found["rollout.temprature"].origin.endswith("run.yaml, line 7")
    assert found["rollout.max_concurrent"].origin.endswith("run.yaml, line 6")
    assert found["trainer.total_steps"].origin == "override trainer.total_steps=eight"
    assert "[number, number]" in found["actor.optim.betas"].reason


def test_the_message_names_key_reason_and_fix() -> None:
    with pytest.raises(ConfigError, match=r"(?s)1 problem.*rollout\.n.*expected integer, at least 1; got 'x'.*fix: "):
        load_config(minimal(rollout={"n": "x"}))


@pytest.mark.parametrize(
    ("section", "values", "key", "said"),
    [
        ("rollout", {"n": True}, "rollout.n", "got true"),
        ("rollout", {"n": 0}, "rollout.n", "at least 1; got 0"),
        ("rollout", {"n": 2.5}, "rollout.n", "expected integer"),
        ("rollout", None, "rollout", "expected a section with keys; got nothing"),
        ("rollout", [1], "rollout", "got [1] (list)"),
        ("trainer", {"logger": "tensorboard"}, "trainer.logger", "expected list of tensorboard"),
        (
            "async_training",
            {"on_stale": "wiat"},
            "async_training.on_stale",
            "expected one of wait, drop, requeue, mask, train",
        ),
        (
            "algorithm",
            {"rollout_correction": {"rollout_is_threshold": [5, 0.5]}},
            "algorithm.rollout_correction.rollout_is_threshold",
            "lower before upper",
        ),
    ],
)
def test_wrong_values_say_what_was_expected_and_what_came(section: str, values: Any, key: str, said: str) -> None:
    assert said in problems(minimal(**{section: values}))[key].reason


def test_a_number_where_text_is_meant_is_told_to_be_quoted() -> None:
    fix = problems(minimal(trainer={"experiment_name": 7}))["trainer.experiment_name"].fix
    assert fix == 'quote it: trainer.experiment_name: "7"'


@pytest.mark.parametrize("source", [{}, {"data": {}}])
def test_missing_tasks_are_asked_for(source: dict[str, Any]) -> None:
    assert problems(source).keys() == {"data.train"}


def test_a_key_with_a_problem_is_not_blamed_twice() -> None:
    found = problems(minimal(rollout={"n": "many", "max_concurrent": 4}))
    assert found.keys() == {"rollout.n"}, "the default n would not fit max_concurrent, but n is what is wrong"


def test_duplicate_keys_are_refused(write: Write) -> None:
    path = write("run.yaml", "data: {train: t.jsonl}\nrollout:\n  n: 4\n  temperature: 1.0\n  n: 8\n")
    assert problems(path)["rollout.n"].reason == "given twice: on line 3 and on line 5"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data: {train: t.jsonl", "line 1"),
        ("- a\n- b\n", "list"),
        ("a: &x\n  b: *x\n", "contains itself"),
        ("a: !!python/object:os.system {}\n", "tag"),
        ("a: 1\n---\nb: 2\n", "document"),
    ],
)
def test_files_that_are_not_a_mapping_are_refused(write: Write, text: str, said: str) -> None:
    [problem] = problems(write("run.yaml", text)).values()
    assert said in problem.reason


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "missing.yaml"
    assert "No such file" in problems(path)[str(path)].reason


def test_overrides_are_checked_for_their_form(write: Write) -> None:
    found = problems(minimal(), ["rollout.n", "rollout..n=1", "rollout.n=[1"])
    assert found.keys() == {"rollout.n", "rollout..n=1", "rollout.n=[1"}


def test_the_last_override_wins_and_mappings_merge() -> None:
    config = load_config(minimal(rollout={"n": 4}), ["rollout.n=8", "rollout={temperature: 0.7}", "rollout.n=16"])
    assert (config.rollout.n, config.rollout.temperature) == (16, 0.7)


def test_the_given_mapping_is_left_as_it_was() -> None:
    source = minimal(extends="modes/on_policy", rollout={"n": 4})
    load_config(source, ["rollout.n=8"])
    assert source == minimal(extends="modes/on_policy", rollout={"n": 4})


class TestExtends:
    def test_later_files_win_and_the_file_itself_last(self, write: Write) -> None:
        write("base/a.yaml", "rollout: {n: 2, temperature: 0.5, max_batch_size: 3}\n")
        write("base/b.yaml", "extends: a.yaml\nrollout: {n: 4, temperature: 0.6}\n")
        path = write("run.yaml", "extends: [base/a.yaml, base/b.yaml]\ndata: {train: t.jsonl}\nrollout: {n: 8}\n")
        rollout = load_config(path).rollout
        assert (rollout.n, rollout.temperature, rollout.max_batch_size) == (8, 0.6, 3)

    def test_a_file_beside_wins_over_a_preset_of_that_name(self, write: Write) -> None:
        write("modes/on_policy.yaml", "rollout: {n: 5}\n")
        path = write("run.yaml", "extends: modes/on_policy\ndata: {train: t.jsonl}\n")
        assert load_config(path).rollout.n == 5

    def test_an_override_can_lay_a_preset_over_the_file(self, write: Write) -> None:
        path = write("run.yaml", "extends: modes/async_partial\ndata: {train: t.jsonl}\n")
        assert load_config(path).max_lag == 1
        config = load_config(path, ["extends=modes/on_policy", "rollout.n=4"])
        assert (config.max_lag, config.rollout.n) == (0, 4)

    def test_a_circle_is_refused_with_its_links(self, write: Write) -> None:
        write("a.yaml", "extends: b.yaml\n")
        write("b.yaml", "extends: c\n")
        write("c.yaml", "extends: a.yaml\n")
        path = write("run.yaml", "extends: a.yaml\ndata: {train: t.jsonl}\n")
        [problem] = problems(path).values()
        assert [Path(name).name for name in problem.reason.partition(": ")[2].split(" -> ")] == [
            "a.yaml",
            "b.yaml",
            "c.yaml",
            "a.yaml",
        ]

    def test_the_same_base_by_two_ways_is_no_circle(self, write: Write) -> None:
        write("base.yaml", "data: {train: t.jsonl}\n")
        write("a.yaml", "extends: base\n")
        write("b.yaml", "extends: base\n")
        assert load_config(write("run.yaml", "extends: [a, b]\n")).data.train == "t.jsonl"

    def test_a_name_that_is_not_found_gets_the_nearest_preset(self) -> None:
        problem = problems(minimal(extends="modes/async_stal"))["extends"]
        assert problem.fix.startswith("did you mean modes/async_stale?")

    def test_only_names_are_taken(self) -> None:
        assert "{'a': 1}" in problems(minimal(extends={"a": 1}))["extends"].reason

    def test_problems_name_the_file_they_come_from(self, write: Write) -> None:
        write("base.yaml", "rollout:\n  max_concurrent: 4\n")
        path = write("run.yaml", "extends: base.yaml\ndata: {train: t.jsonl}\n")
        assert problems(path)["rollout.max_concurrent"].origin.endswith("base.yaml, line 2")


def test_loading_is_light() -> None:
    code = (
        "import sys, time\n"
        "started = time.process_time()\n"
        "import pydantic.main, yaml\n"
        "unit = time.process_time() - started  # how fast this machine is now\n"
        "started = time.process_time()\n"
        "from agentrl.config import load_config\n"
        "load_config({'data': {'train': 't.jsonl'}, 'extends': 'modes/async_partial'})\n"
        "imports = (time.process_time() - started) / unit\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tensorboard', 'rich'} & sys.modules.keys()\n"
        "print(imports)\n"
        "sys.exit(f'{heavy} {imports}' if heavy or imports > 4 else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_loaded_configuration_does_not_change() -> None:
    config: RunConfig = load_config(minimal())
    with pytest.raises(ValueError, match="frozen"):
        config.rollout.n = 3


@pytest.mark.parametrize(
    ("overrides", "filters"),
    [
        ([], True),
        (["algorithm.adv_estimator=reinforce_plus_plus"], False),
        (["algorithm.overlong_buffer_len=10"], False),
        (["algorithm.use_kl_in_reward=true"], False),
        (["algorithm.overlong_buffer_len=10", "rollout.filter_zero_variance=true"], True),
        (["rollout.filter_zero_variance=false"], False),
    ],
)
def test_groups_without_variance_are_dropped_where_they_teach_nothing(overrides: list[str], filters: bool) -> None:
    assert load_config(minimal(), overrides).filters_zero_variance is filters


class TestTakingBack:
    """Null for a key that can't be null: as if no file had given it."""

    BASE: ClassVar = {"data": {"train": "t.jsonl"}, "actor": {"clip_ratio_low": 0.1, "grad_clip": 0.5}}

    def test_an_override_takes_back_what_a_file_gives(self) -> None:
        config = load_config(self.BASE, ["actor.clip_ratio_low=null"])
        assert (config.actor.clip_ratio_low, config.actor.grad_clip) == (0.2, 0.5)
        assert "clip_ratio_low" not in config.actor.model_fields_set

    def test_a_preset_that_ignores_a_key_can_be_laid_over_a_file_that_gives_it(self, write: Write) -> None:
        base = write("base.yaml", yaml.safe_dump(self.BASE))
        top = "extends: [base.yaml, correction/bypass_pg_is]\nactor:\n  clip_ratio_low: null\n"
        assert load_config(write("run.yaml", top)).actor.proximal == "bypass"
        assert problems(base, ["extends=correction/bypass_pg_is"]).keys() == {"actor.clip_ratio_low"}

    def test_a_whole_section_can_be_taken_back(self) -> None:
        gae = {**self.BASE, "algorithm": {"adv_estimator": "gae"}, "critic": {"optim": {"lr": 1e-4}}}
        assert not load_config(gae, ["algorithm.adv_estimator=grpo", "critic=null"]).has_critic

    def test_the_last_override_counts(self) -> None:
        keys = ["actor.clip_ratio_low=0.15", "actor.clip_ratio_low=null"]
        assert load_config(self.BASE, keys).actor.clip_ratio_low == 0.2
        assert load_config(self.BASE, keys[::-1]).actor.clip_ratio_low == 0.15

    def test_where_null_is_a_value_it_stays_one(self) -> None:
        base = {"data": {"train": "t.jsonl", "val": "v.jsonl", "answer_key": "gold"}}
        assert load_config(base, ["data.answer_key=null"]).data.answer_key is None

    def test_where_nothing_was_given_null_is_refused(self) -> None:
        assert problems(self.BASE, ["rollout.n=null"]).keys() == {"rollout.n"}


def test_an_empty_mapping_clears_values_and_no_section() -> None:
    base = {"data": {"train": "a:b", "train_args": {"count": 3}}, "rollout": {"n": 4}}
    config = load_config(base, ["data.train=t.jsonl", "data.train_args={}", "rollout={}"])
    assert (config.data.train, config.data.train_args, config.rollout.n) == ("t.jsonl", {}, 4)
