"""llama-swap's configuration, read as llama-swap reads it: YAML, environment, macros, directories, mistakes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.errors import SettingsError
from proxy.llama_swap import LlamaSwapConfig, LocalModel, load, parse
from proxy.simulator import load_config

EXAMPLES = Path(__file__).parent.parent / "config" / "examples"


def refusal(text: str, environ: dict[str, str] | None = None) -> list[str]:
    with pytest.raises(SettingsError) as caught:
        parse(text, environ or {})
    return [problem.removeprefix("llama-swap's configuration: ") for problem in caught.value.problems]


def only_model(text: str, environ: dict[str, str] | None = None) -> LocalModel:
    (model,) = parse(text, environ or {}).models.values()
    return model


# What a model says.


def test_a_model_has_its_aliases_slots_and_flags() -> None:
    model = only_model("""
models:
  q27:
    aliases: [gpt-4o, default]
    concurrencyLimit: 3
    unlisted: true
    compat: {ignoreWebsockets: true}
    capabilities: {in: [text, image], out: [text], tools: true, context: 32768}
    filters: {setParamsByID: {q27: {}, "q27:high": {}, gpt-4o: {}}}
""")
    assert model.aliases == ("gpt-4o", "default", "q27:high")
    assert model.set_params_ids == ("q27", "q27:high", "gpt-4o")
    assert (model.slots, model.unlisted, model.ignore_websockets) == (3, True, True)
    assert model.capabilities.inputs == {"text", "image"}
    assert model.capabilities.tools
    assert not model.capabilities.reranker


@pytest.mark.parametrize(
    ("name", "limit", "slots"),
    [
        *(("a", limit, slots) for limit, slots in (("~", 10), ("0", 10), ("-1", 10), ("1", 1), ("5.7", 5), ("99", 99))),
        *(("comfyui_auto", limit, slots) for limit, slots in (("~", 50), ("3", 50), ("80", 80))),
    ],
)
def test_slots_are_the_limit_or_ten_and_for_comfyui_at_least_fifty(name: str, limit: str, slots: int) -> None:
    model = only_model(f"models: {{{name}: {{concurrencyLimit: {limit}}}}}")
    assert model.slots == slots
    assert model.ignore_websockets == (name == "comfyui_auto")


def test_a_model_with_nothing_below_it_is_one() -> None:
    assert only_model("models:\n  a:\n") == LocalModel("a")


def test_an_empty_file_is_a_configuration_without_models() -> None:
    assert parse("# nothing yet\n", {}).models == {}
    assert parse("", {}).models == {}


def test_what_llama_swap_does_not_have_is_passed_over_and_noted() -> None:
    config = parse("modles: {}\nmodels: {a: {cmmd: x, conurrencyLimit: 3}}\ngroups: {g: {member: [a]}}", {})
    assert config.notes == (
        "top level: unknown: modles",
        "models.a: unknown: cmmd, conurrencyLimit",
        "groups.g: unknown: member",
    )


# YAML.


@pytest.mark.parametrize(
    ("written", "alias"),
    [
        *(("1.0", "1"), ("1e6", "1e+06"), ("0x10", "16"), ("010", "8"), ("08", "8"), ("1_000", "1000")),
        *(("yes", "yes"), ("On", "On"), ("True", "true"), ("'True'", "True"), ("1:30", "1:30"), (".5", "0.5")),
        *(("2024-01-01", "2024-01-01T00:00:00Z"), ("2024-08", "2024-08"), ("2024-13-01", "2024-13-01")),
        *(("2001-12-14t21:59:43.1Z", "2001-12-14t21:59:43.1Z"), ("1e21", "1e+21"), ("0.00001", "1e-05")),
        *(("12345678901234567890", "12345678901234567890"), ("123456.5", "123456.5"), (".inf", ".inf")),
        *(("0b11", "3"), ("0o17", "15"), ("-0x1f", "-31"), ("+5", "5"), ("1e400", "1e400"), ("-.inf", "-.inf")),
        *(("!!str 1.0", "1.0"), ("!!float 1", "1"), ("!!binary YQ==", "a"), ("!x 1.0", "1.0"), ("-0.0", "-0")),
    ],
)
def test_any_scalar_can_be_a_name_and_a_number_s_is_as_go_writes_it(written: str, alias: str) -> None:
    assert only_model(f"models: {{a: {{aliases: [{written}]}}}}").aliases == (alias,)


@pytest.mark.parametrize(
    ("written", "alias"),
    [
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14T21:59:43.1-05:00"),
        ("2001-1-2 1:2:3", "2001-01-02T01:02:03Z"),
        ("2001-12-14T21:59:43+00:00", "2001-12-14T21:59:43Z"),
        ("2001-12-14T21:59:43", "2001-12-14T21:59:43"),
        ("2001-12-14 21:59:43Z", "2001-12-14 21:59:43Z"),
    ],
)
def test_a_time_is_one_only_outside_braces_and_brackets(written: str, alias: str) -> None:
    assert only_model(f"models:\n  a:\n    aliases:\n    - {written}\n").aliases == (alias,)
    assert only_model(f"models: {{a: {{aliases: [{written}]}}}}").aliases == (written,)


def test_nulls_in_a_list_are_dropped() -> None:
    assert only_model("models: {a: {aliases: [null, ~, x, ]}}").aliases == ("x",)


@pytest.mark.parametrize(
    ("written", "value"),
    [(word, True) for word in ("true", "TRUE", "yes", "Yes", "on", "ON", "y", "'yes'")]
    + [(word, False) for word in ("false", "no", "Off", "n", "~")],
)
def test_a_flag_can_be_written_in_the_words_of_older_yaml(written: str, value: bool) -> None:
    assert only_model(f"models: {{a: {{unlisted: {written}}}}}").unlisted is value


def test_an_id_that_is_read_as_a_number_must_be_quoted_since_llama_swap_has_no_model_then() -> None:
    assert refusal("models: {123: {}, a: {}}") == [
        'models: the id 123 is read as a number or the like, and llama-swap then has no model at all; write it as "123"'
    ]
    assert only_model("models: {'123': {}}").id == "123"
    assert only_model("models: {yes: {}}").id == "yes"


def test_anchors_and_merge_keys_are_resolved_and_an_anchor_may_be_defined_anew() -> None:
    config = parse(
        """
models:
  a: &base {concurrencyLimit: 3, unlisted: true}
  b: {<<: *base, concurrencyLimit: 4}
  c: &base {concurrencyLimit: 5}
  d: {<<: [*base, {concurrencyLimit: 6, unlisted: yes}]}
""",
        {},
    )
    assert {name: (model.slots, model.unlisted) for name, model in config.models.items()} == {
        "a": (3, True),
        "b": (4, True),
        "c": (5, False),
        "d": (5, True),
    }


def test_only_the_first_document_is_read() -> None:
    assert only_model("models: {a: {}}\n---\nmodels: {b: {}}\n").id == "a"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: {a: {}, a: {}}", "line 1: the key 'a' stands in line 1 already"),
        ("models:\n  a: {x: 1}\n  b: {'1': 1, 1: 2}", "line 3: the key '1' stands in line 3 already"),
        ("models: {[a]: {}}", "line 1: a key must be plain text"),
        ("models: [", "not valid YAML in line 1, column 10: expected the node content, but found '<stream end>'"),
        ("models: *nobody", "not valid YAML in line 1, column 9: found undefined alias 'nobody'"),
        ("a: &x [*x]", "line 1: nested too deeply, or an anchor whose value contains itself"),
        ("a: {<<: 3}", "line 1: what << merges in must be a mapping, or a list of them"),
        ("a: !!int x", "line 1: 'x' is not what its tag !!int says"),
        ("- a", "it must be a mapping, such as `models:` with models below it"),
        ("just text", "it must be a mapping, such as `models:` with models below it"),
        ("\x01", "not valid YAML: unacceptable character #x0001: special characters are not allowed"),
    ],
)
def test_text_that_cannot_be_read_is_refused_with_its_place(text: str, problem: str) -> None:
    assert refusal(text) == [problem]


def test_deep_nesting_is_refused_and_not_a_crash() -> None:
    assert "nested too deeply" in refusal("a: " + "[" * 150 + "]" * 150)[0]
    assert refusal("a: " + "[" * 5_000)[0].startswith("not valid YAML")


SECTIONS = ("models", "groups", "matrix", "selectors", "profiles", "peers", "apiKeys", "upstream", "routing", "macros")
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


@settings(deadline=None)
@given(st.sampled_from(SECTIONS), VALUES)
def test_nothing_that_is_yaml_fails_otherwise_than_by_a_settings_error(section: str, value: Any) -> None:
    for text in (yaml.safe_dump({section: value}), yaml.safe_dump({section: {"a": value}, "models": {"a": value}})):
        with suppress(SettingsError):
            parse(text, {})


def test_aliases_that_repeat_too_much_are_refused() -> None:
    levels = [f"x{level}: &x{level} [{', '.join([f'*x{level - 1}'] * 10)}]" for level in range(1, 9)]
    assert refusal("x0: &x0 [1]\n" + "\n".join(levels)) == ["it has too many values, counting what its aliases repeat"]


# The environment.


def test_variables_are_replaced_in_the_text_before_it_is_yaml() -> None:
    text = "apiKeys: [${env.KEY}]\nmodels: {a: {aliases: ['${env.NAME}-x'], concurrencyLimit: ${env.LIMIT}}}"
    config = parse(text, {"KEY": "k1, k2", "NAME": "n", "LIMIT": "4"})
    assert config.api_keys == ("k1", "k2")
    assert config.models["a"].aliases == ("n-x",)
    assert config.models["a"].slots == 4


def test_quotes_and_backslashes_of_a_variable_are_escaped_for_double_quotes() -> None:
    assert only_model('models: {a: {aliases: ["${env.N}"]}}', {"N": 'a"b\\c'}).aliases == ('a"b\\c',)


def test_an_unset_variable_does_not_matter_where_nothing_hangs_on_it() -> None:
    config = parse(
        """
# ${env.IN_A_COMMENT}
models:
  a: {cmd: run ${env.TOKEN}, name: "${env.NAME}", description: "${env.D}", metadata: {x: "${env.M}"}, unlisted: no}
""",
        {},
    )
    assert config.models["a"] == LocalModel("a")
    assert config.notes == ()


def test_an_unset_variable_in_a_number_or_a_flag_is_noted_and_the_default_taken() -> None:
    config = parse(
        "models: {a: {concurrencyLimit: ${env.N}, unlisted: '${env.U}', capabilities: {in: [${env.I}]}}}", {}
    )
    assert config.models["a"] == LocalModel("a")
    assert set(config.notes) == {
        "models.a.concurrencyLimit: ${env.N} is not set here, so this is passed over",
        "models.a.unlisted: ${env.U} is not set here, so this is passed over",
        "models.a.capabilities.in: ${env.I} is not set here, so this is passed over",
    }


UNSET = "the environment variable X is not set here; set it as for llama-swap"


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("models: {'${env.X}': {}}", "models"),
        ("models: {a: {aliases: ['${env.X}']}}", "models.a.aliases"),
        ("models: {a: {aliases: '${env.X}'}}", "models.a.aliases"),
        ("models: {a: {filters: {setParamsByID: {'a:${env.X}': {}}}}}", "models.a.filters.setParamsByID"),
        ("macros: {m: '${env.X}'}\nmodels: {a: {aliases: ['${m}-x']}}", "models.a.aliases"),
        ("apiKeys: ['${env.X}']", "apiKeys"),
        ("models: {a: {}}\ngroups: {g: {members: ['${env.X}']}}", "groups.g"),
        ("models: {a: {}}\ngroups: {g: {members: [a], swap: '${env.X}'}}", "groups.g.swap"),
        ("models: {a: {}}\nrouting: {router: {use: '${env.X}'}}", "routing.router.use"),
        ("models: {a: {}}\nmatrix: {sets: {s: 'a & ${env.X}'}}", "matrix.sets.s"),
        ("models: {a: {}}\nmatrix: {sets: {s: a}, evict_costs: {a: '${env.X}'}}", "matrix.evict_costs.a"),
        ("models: {a: {}}\nselectors: {s: {strategy: pin, targets: ['${env.X}']}}", "selectors.s.targets"),
        ("models: {a: {}}\nprofiles: {p: {pins: {a: '${env.X}'}}}", "profiles.p.pins.a"),
        ("peers: {p: {proxy: 'http://x', models: ['${env.X}']}}", "peers.p.models"),
    ],
)
def test_an_unset_variable_in_a_name_in_routing_or_in_keys_is_an_error_that_names_both(text: str, at: str) -> None:
    assert f"{at}: {UNSET}" in refusal(text)
    assert not any("\ue000" in problem for problem in refusal(text))


def test_a_variable_with_a_line_break_counts_as_unset() -> None:
    assert refusal("apiKeys: ['${env.X}']", {"X": "a\nb"}) == [f"apiKeys: {UNSET}"]


# Macros.


def test_macros_are_replaced_the_last_declared_first_so_that_they_may_use_those_above_them() -> None:
    text = "macros: {base: qwen, full: '${base}-27b'}\nmodels: {a: {aliases: ['${full}', '${base}']}}"
    assert only_model(text).aliases == ("qwen-27b", "qwen")
    text = "macros: {full: '${base}-27b', base: qwen}\nmodels: {a: {aliases: ['${full}']}}"
    assert refusal(text) == ["models.a.aliases: the macro ${base} is not known here"]


def test_a_model_s_own_macros_overrule_the_global_ones_in_their_place() -> None:
    config = parse(
        """
macros: {size: 8b, tag: "${size}-q4"}
models:
  a: {aliases: ["a-${tag}"]}
  b: {macros: {size: 27b, more: "${MODEL_ID}+${tag}"}, aliases: ["${more}"]}
""",
        {},
    )
    assert [model.aliases for model in config.models.values()] == [("a-8b-q4",), ("b+27b-q4",)]


def test_a_value_that_is_only_a_macro_takes_its_type() -> None:
    model = only_model("macros: {n: 3, u: true}\nmodels: {a: {concurrencyLimit: '${n}', unlisted: '${u}'}}")
    assert (model.slots, model.unlisted) == (3, True)
    assert refusal("macros: {n: 3}\nmodels: {a: {concurrencyLimit: '${n}0'}}") == [
        "models.a.concurrencyLimit: it must be a whole number, not '30'"
    ]


def test_keys_of_set_params_by_id_are_replaced_and_other_keys_are_not() -> None:
    text = "macros: {m: high}\nmodels: {a: {filters: {setParamsByID: {'${MODEL_ID}': {}, '${MODEL_ID}:${m}': {}}}}}"
    assert only_model(text).set_params_ids == ("a", "a:high")
    assert "unknown macro ${x}" in refusal("models: {a: {filters: {setParamsByID: {'${x}': {}}}}}")[0]
    assert "two keys become 'a'" in refusal("models: {a: {filters: {setParamsByID: {'${MODEL_ID}': {}, a: {}}}}}")[0]


def test_macros_are_replaced_in_routing_selectors_profiles_peers_and_keys() -> None:
    config = parse(
        """
macros: {m: a, key: 12345}
models: {a: {}, b: {}}
routing: {router: {use: matrix, settings: {matrix: {sets: {s: "${m} & b"}}}}}
selectors: {s: {strategy: pin, targets: ["${m}"]}}
profiles: {p: {pins: {x: "${m}"}}}
peers: {p: {proxy: "http://x", models: ["${m}-far"]}}
apiKeys: ["${key}"]
""",
        {},
    )
    assert config.router.fits_together({"a", "b"})
    assert config.selectors["s"].targets == ("a",)
    assert config.profiles["p"] == {"x": "a"}
    assert config.peers == {"p": ("a-far",)}
    assert config.api_keys == ("12345",)


@pytest.mark.parametrize(
    ("macros", "problem"),
    [
        ("[a]", "macros: it must be a mapping of names to values"),
        ("{PORT: 1}", "macros.PORT: this name is llama-swap's own"),
        ("{'a b': 1}", "macros.a b: a macro's name must be letters, digits, _ and -, at most 63"),
        ("{a: [1]}", "macros.a: a macro's value must be text, a number or a boolean"),
        ("{a: 'x${a}'}", "macros.a: it holds itself"),
    ],
)
def test_a_macro_that_llama_swap_refuses_is_refused(macros: str, problem: str) -> None:
    assert refusal(f"macros: {macros}") == [problem]
    assert refusal(f"models: {{m: {{macros: {macros}}}}}") == [f"models.m.{problem}"]


# Directories.


def directory(path: Path, **files: str) -> Path:
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text, encoding="utf-8")
    return path


def test_the_files_of_a_directory_are_merged_in_the_order_of_their_names(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").mkdir()
    directory(
        tmp_path,
        b_yaml="models: {b: {}}\napiKeys: [k2]\nhealthCheckTimeout: 60\nupstream:\n",
        a_yml="models: {a: {}}\napiKeys: [k1]\nhealthCheckTimeout: 60\nupstream: {ignorePaths: [x]}\n",
        d_yaml="# nothing",
        e_txt="models: {e: {}}",
        f_yaml="groups: {g: {members: [a, b], swap: false}}",
    )
    config = load(tmp_path, {})
    assert list(config.models) == ["a", "b"]
    assert config.api_keys == ("k1", "k2")
    assert [pattern.pattern for pattern in config.ignore_paths] == ["x"]
    assert config.router.fits_together({"a", "b"})


@pytest.mark.parametrize(
    ("section", "entry"),
    [
        ("models", "{}"),
        ("groups", "{members: [m]}"),
        ("selectors", "{strategy: pin, targets: [m]}"),
        ("peers", "{proxy: 'http://x', models: [x]}"),
        ("profiles", "{pins: {y: m}}"),
    ],
)
def test_an_entry_in_two_files_is_an_error(tmp_path: Path, section: str, entry: str) -> None:
    directory(tmp_path, a_yaml=f"{section}: {{a: {entry}}}", b_yaml=f"{section}: {{a: {entry}}}")
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, {})
    where = tmp_path / "b.yaml"
    assert caught.value.problems == [f"{where}: {section}.a stands in a file before it too; keep one of them"]


def test_another_scalar_or_another_kind_of_value_in_two_files_is_an_error(tmp_path: Path) -> None:
    directory(tmp_path, a_yaml="logLevel: info\nmodels:\nhooks: {on_startup: {}}",
              b_yaml="logLevel: debug\nmodels: {a: {}}\nhooks: {on_startup: []}")  # fmt: skip
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, {})
    assert caught.value.problems == [
        f"{tmp_path / 'b.yaml'}: logLevel has another value here than in a file before it",
        f"{tmp_path / 'b.yaml'}: models must be a mapping in every file that has it",
        f"{tmp_path / 'b.yaml'}: hooks.on_startup has another value here than in a file before it",
    ]


def test_paths_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for path, why in (
        (tmp_path / "none.yaml", "cannot be read: No such file or directory"),
        (tmp_path, "there is no *.yml and no *.yaml in this directory"),
    ):
        with pytest.raises(SettingsError) as caught:
            load(path, {})
        assert caught.value.problems == [f"{path}: {why}"]
    (tmp_path / "bad.yaml").write_bytes(b"a: \xff")
    with pytest.raises(SettingsError, match="is not UTF-8 at byte 3"):
        load(tmp_path / "bad.yaml", {})


# What llama-swap refuses.

TWO = "models: {a: {}, b: {aliases: [bee]}}\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("models: [a]", "models: it must be a mapping of keys to values"),
        ("models: {a: x}", "models.a: it must be a mapping of keys to values"),
        ("models: {a: {aliases: x}}", "models.a.aliases: it must be a list"),
        ("models: {a: }", "models.a: it must be a mapping of keys to values"),
        ("models: {a: {unlisted: }}", "models.a.unlisted: it must be true or false, not ''"),
        ("models: {a: {aliases: [{x: y}]}}", "models.a.aliases: it must be text"),
        ("models: {a: {unlisted: maybe}}", "models.a.unlisted: it must be true or false, not 'maybe'"),
        ("models: {a: {concurrencyLimit: '5'}}", "models.a.concurrencyLimit: it must be a whole number, not '5'"),
        (
            "models: {a: {capabilities: {in: [video]}}}",
            "models.a.capabilities.in: 'video' must be text, audio or image",
        ),
        (
            "models: {a: {aliases: [x]}, b: {aliases: [x]}}",
            "models.b.aliases: 'x' is an alias already; an alias must stand once",
        ),
        ("models: {a: {aliases: [x, x]}}", "models.a.aliases: 'x' is an alias already; an alias must stand once"),
        (
            "models: {a: {}, b: {filters: {setParamsByID: {a: {}}}}}",
            "models.b.filters.setParamsByID: 'a' is the id of another model",
        ),
        (
            "models: {a: {aliases: [x]}, b: {filters: {setParamsByID: {x: {}}}}}",
            "models.b.aliases: 'x' is an alias already; an alias must stand once",
        ),
        (
            TWO + "groups: {g: {members: [a]}, h: {members: [a]}}",
            "groups.h: 'a' must stand in one group only, and once",
        ),
        (TWO + "groups: {g: {members: [a, a]}}", "groups.g: 'a' must stand in one group only, and once"),
        (TWO + "groups: {g: {members: [c]}}", "groups.g: 'c' is not one of the models"),
        (
            TWO + "groups: {(default): {members: [a]}}",
            "groups.(default): llama-swap needs this name for the models in no group; take another",
        ),
        (
            TWO + "groups: {g: {members: [a]}}\nmatrix: {sets: {s: a}}",
            "matrix: it must not stand beside groups; keep one of them",
        ),
        (
            TWO + "groups: {g: {members: [a]}}\nrouting: {router: {use: group}}",
            "routing.router: it must not stand beside a matrix or groups at top level; move them there",
        ),
        (
            TWO + "matrix: {sets: {s: a}}\nrouting: {router: {settings: {groups: {g: {members: [a]}}}}}",
            "routing.router: it must not stand beside a matrix or groups at top level; move them there",
        ),
        (
            TWO + "routing: {router: {use: matrix}}",
            "routing.router.use: it is matrix, but routing.router.settings.matrix is not there",
        ),
        (TWO + "routing: {router: {use: best}}", "routing.router.use: it must be group or matrix, not 'best'"),
        (TWO + "routing: {scheduler: {use: lifo}}", "routing.scheduler.use: it must be fifo, not 'lifo'"),
        (
            TWO + "routing: {scheduler: {settings: {fifo: {priority: {c: 1}}}}}",
            "routing.scheduler.settings.fifo.priority: 'c' is not one of the models",
        ),
        (TWO + "matrix: {}", "matrix.sets: it must hold at least one set"),
        (
            TWO + "selectors: {s: {targets: [a]}}",
            "selectors.s.strategy: it must be pin, warm or spillover, not ''",
        ),
        (TWO + "selectors: {s: {strategy: pin}}", "selectors.s.targets: it must name at least one model"),
        (TWO + "selectors: {s: {strategy: pin, targets: [c]}}", "selectors.s.targets: 'c' is not one of the models"),
        (TWO + "selectors: {bee: {strategy: pin, targets: [a]}}", "selectors.bee: this is the name of a model too"),
        (
            TWO + "selectors: {s: {strategy: pin, targets: [a]}, t: {strategy: pin, targets: [s]}}",
            "selectors.t.targets: 's' is a selector; only models may be targets",
        ),
        (
            TWO + "peers: {p: {proxy: 'http://x', models: [c]}}\nselectors: {s: {strategy: warm, targets: [c]}}",
            "selectors.s.targets: 'c' is a peer's model; warm selectors choose among local ones",
        ),
        (
            TWO + "selectors: {s: {strategy: spillover, targets: [a, b]}}",
            "selectors.s.targets: they must be together in one set of the matrix, or in one group with swap: false",
        ),
        (
            TWO + "matrix: {sets: {s: a | b}}\nselectors: {s: {strategy: spillover, targets: [a, b]}}",
            "selectors.s.targets: they must be together in one set of the matrix, or in one group with swap: false",
        ),
        (
            TWO + "selectors: {s: {strategy: spillover, targets: [b, bee]}}",
            "selectors.s.targets: two of them are the same model",
        ),
        (
            TWO + "selectors: {s: {strategy: spillover, targets: [a], settings: {spillover: 0}}}",
            "selectors.s.settings.spillover: it must be at least 1",
        ),
        (TWO + "profiles: {p: {}}", "profiles.p.pins: it must hold at least one name"),
        (TWO + "profiles: {p: [a]}", "profiles.p: it must be a mapping of keys to values"),
        (
            TWO + "profiles: {p: {pins: {x: c}}}",
            "profiles.p.pins.x: 'c' is neither a model nor a selector",
        ),
        ("peers: {p: {models: [x]}}", "peers.p.proxy: it must be the peer's address"),
        ("peers: {p: {proxy: 'http://x'}}", "peers.p.models: it must name at least one model"),
        (
            "models: {p/x: {}}\npeers: {p: {proxy: 'http://x', models: [x]}}",
            "peers.p: 'p/x', the full name of its model, is another name already",
        ),
        (
            "peers: {p: {proxy: 'http://x', models: [q/x]}, p/q: {proxy: 'http://x', models: [x]}}",
            "peers.p/q: 'p/q/x' is the full name of a model of p too",
        ),
        (
            "profiles: {n: {pins: {p/x: ''}}}\npeers: {p: {proxy: 'http://x', models: [x]}}",
            "peers.p: 'p/x', the full name of its model, must not be pinned by a profile",
        ),
        ("apiKeys: ['']", "apiKeys: a key must not be empty, and must hold no space"),
        ("apiKeys: [secret key]", "apiKeys: a key must not be empty, and must hold no space"),
    ],
)
def test_a_configuration_that_llama_swap_refuses_is_refused_in_one_sentence(text: str, problem: str) -> None:
    assert problem in refusal(text)


def test_every_mistake_is_named_at_once_and_no_key_is_shown() -> None:
    text = "models: {a: {unlisted: maybe}, 1: {}}\nmatrix: {sets: {s: x}}\napiKeys: [se cret]"
    found = refusal(text)
    assert len(found) == 4
    assert not any("se cret" in problem for problem in found)


def test_keys_are_not_shown_in_the_configuration_s_repr() -> None:
    assert "hush" not in repr(parse("apiKeys: [hush]", {}))


# Where the routing comes from.


@pytest.mark.parametrize(
    ("text", "routing"),
    [
        ("", "default"),
        ("groups: {}\nmatrix:\n", "default"),
        ("groups: {g: {members: [a]}}", "groups"),
        ("matrix: {sets: {s: a & b}}", "matrix"),
        ("routing: {router: {settings: {groups: {g: {members: [a]}}}}}", "groups"),
        ("routing: {router: {use: group, settings: {groups: {g: {members: [a]}}}}}", "groups"),
        ("routing: {router: {use: matrix, settings: {matrix: {sets: {s: a & b}}}}}", "matrix"),
        (
            "routing: {router: {use: matrix, settings: {matrix: {sets: {s: a & b}}, groups: {g: {members: [a]}}}}}",
            "matrix",
        ),
        ("matrix: {sets: {s: a & b}}\nrouting: {scheduler: {use: fifo}, router: {}}", "matrix"),
    ],
)
def test_the_router_is_taken_from_where_llama_swap_takes_it(text: str, routing: str) -> None:
    assert parse(TWO + text, {}).routing == routing


def test_a_matrix_that_is_not_used_is_noted_and_every_model_excludes_every_other() -> None:
    config = parse(TWO + "routing: {router: {settings: {matrix: {sets: {s: a & b & nobody}}}}}", {})
    assert config.routing == "default"
    assert config.router.evict("a", {"b"}) == {"b"}
    assert config.notes == (
        "routing.router.settings.matrix: llama-swap passes it over without `use: matrix` in routing.router",
    )


def test_an_alias_among_a_group_s_members_is_passed_over_as_llama_swap_does() -> None:
    config = parse(TWO + "groups: {g: {members: [a, bee], swap: false}}", {})
    assert not config.router.fits_together({"a", "b"})
    assert config.notes == ("groups.g: 'bee' is an alias, which llama-swap passes over here",)


def test_a_group_without_values_has_none_of_the_defaults_and_no_member() -> None:
    config = parse(TWO + "groups:\n  g:\n", {})
    assert config.router.evict("a", {"b"}) == {"b"}


# Ignored paths.


def ignored(config: LlamaSwapConfig, path: str) -> bool:
    return any(pattern.search(path) for pattern in config.ignore_paths)


@pytest.mark.parametrize(
    ("paths", "path", "expected"),
    [
        ("", "/x/style.css", True),
        ("", "/x.css/", False),
        ("", "/style.css\n", False),
        ("ignorePaths: []", "/a.js", True),
        ("ignorePaths: ['^/assets/', '[.]woff2?$']", "/assets/x", True),
        ("ignorePaths: ['^/assets/', '[.]woff2?$']", "/x.woff2", True),
        ("ignorePaths: ['^/assets/', '[.]woff2?$']", "/a.js", False),
        ("ignorePaths: ['[$]x|\\$y$']", "/$y", True),
        ("ignorePaths: ['(?i)\\.JS$']", "/a.js", True),
    ],
)
def test_ignored_paths_are_go_s_expressions(paths: str, path: str, expected: bool) -> None:
    assert ignored(parse(f"upstream: {{{paths}}}", {}), path) is expected


@pytest.mark.parametrize("pattern", [r"\pL", "[[:alpha:]]", "(?<name>x)", "(?m)^x$", "(?U)x+", r"x\z", "a(?=b)", "("])
def test_an_expression_that_python_reads_otherwise_is_noted_and_ignores_nothing(pattern: str) -> None:
    config = parse(yaml.safe_dump({"upstream": {"ignorePaths": [pattern]}}), {})
    assert config.ignore_paths == ()
    assert config.notes == (f"upstream.ignorePaths: {pattern!r} cannot be used here, so that such paths take a lease",)


# The examples.


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_examples_are_whole_and_the_simulator_takes_them_too(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLAMA_SWAP_KEY", "k")
    config = load(path, {"LLAMA_SWAP_KEY": "k"})
    assert config.notes == ()
    assert set(load_config(path).models) == set(config.models)


def test_these_are_the_examples() -> None:
    names = sorted(path.name for path in EXAMPLES.iterdir())
    assert names == ["groups.yaml", "home-server.yaml", "matrix.yaml", "peers.yaml"]
