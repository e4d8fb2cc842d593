"""`check` with llama-swap's configuration: what decided, each model with the reasons, and no secret."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from config_table import config_table
from proxy.check import COLUMNS, MOST_SETS, report
from proxy.errors import SettingsError
from proxy.settings import read

EXAMPLES = Path(__file__).resolve().parents[1] / "config/examples"
QUIET = {"GPU_LEASE_UPSTREAM_URL": "http://gpu:8080"}

MATRIX = """
models: {a: {}, b: {}, v: {}, e: {}}
matrix: {sets: {main: "(a | b | v) & e"}}
"""


def check(config: str | Path, *names: str, environ: dict[str, str] | None = None, **values: Any) -> str:
    """The report for a llama-swap configuration, as text or as a path, and settings by key."""
    if not isinstance(config, Path):
        path = Path(values.pop("folder")) / "llama-swap.yaml"
        path.write_text(config)
        config = path
    variables = {f"GPU_LEASE_{key.upper()}": value for key, value in values.items()}
    variables |= QUIET | {"GPU_LEASE_LLAMA_SWAP_CONFIG": str(config)}
    return report(*read(None, variables), names, environ or {})


def section(text: str, title: str) -> list[str]:
    """The lines below `title`, with one space where there are several."""
    lines = text.partition(f"\n{title}\n")[2].partition("\n\n")[0].splitlines()
    return [re.sub(r" +", " ", line.strip()) for line in lines]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


# --- models


def test_each_model_stands_there_with_its_class_lease_slots_names_and_the_reasons() -> None:
    assert section(check(EXAMPLES / "groups.yaml"), "Models") == [
        "MODEL CLASS LEASE SLOTS WHY",
        "chat llm read 10 class: default_class, except on a speech, transcription or image route",
        "lease: llm shares with what is resident beside it",
        "names: default",
        "coder llm read 4 class: default_class, except on a speech, transcription or image route",
        "lease: llm shares with what is resident beside it",
        "kokoro tts write 10 class: capabilities in llama-swap's configuration",
        "lease: speech, and not resident beside any chat model that takes a lease",
        "embed embed none 10 class: built-in pattern *embed*",
        "lease: always resident: no request for another model stops it, and it stops none",
        "rerank embed none 10 class: capabilities in llama-swap's configuration",
        "lease: always resident: no request for another model stops it, and it stops none",
    ]


def test_the_table_of_a_configuration_can_be_had_alone() -> None:
    table = config_table(
        EXAMPLES / "home-server.yaml", {"LLAMA_SWAP_KEY": "hunter2"}, classes={"stt": {"lease": "none"}}
    )
    assert "\n".join(section(f"\nModels\n{table}\n\n", "Models")).startswith("MODEL CLASS LEASE SLOTS WHY\nsmall llm")
    assert re.search(r"^  whisper +stt +none +2 ", table, re.MULTILINE)
    assert re.search(r"^  a +llm +read +10 ", config_table(MATRIX), re.MULTILINE)


def test_names_behind_the_command_are_resolved_or_said_to_be_unknown(folder: str) -> None:
    config = "models: {a: {aliases: [x]}, b: {}}\nselectors: {s: {strategy: pin, targets: [b]}}\n"
    config += "peers: {there: {proxy: http://there, models: [far]}}\n"
    found = section(check(config, "x", "s", "far", "nobody", folder=folder), "Models")
    assert [line for line in found if "stands for" in line] == [
        *("stands for: a", "stands for: b", "stands for: there/far")
    ]
    assert found[-4].startswith("far llm none - class:")
    assert found[-3] == "lease: a peer serves it"
    assert found[-1] == "nobody - - - llama-swap has no such name: the answer is 404"


def test_a_configuration_without_models_is_said_to_have_none(folder: str) -> None:
    assert section(check("{}", folder=folder), "Models") == ["llama-swap's configuration has no models."]


def test_lines_are_readable_in_a_terminal(folder: str) -> None:
    names = [f"publisher/model-{number}-instruct-2507-GGUF:Q4_K_M" for number in range(30)]
    models = ", ".join(f'"{name}": {{aliases: ["{name}-alias", "{name}-other"]}}' for name in names)
    text = check(f"models: {{{models}}}", folder=folder, classes__tts__models="*voice*,*speech*," * 20)
    lines = [line for line in text.splitlines() if folder not in line]  # a path of any length stays whole
    assert max(map(len, lines)) <= COLUMNS
    assert all(f"\n  {name} " in text for name in names)


def test_a_name_cannot_steer_the_terminal(folder: str) -> None:
    text = check('models: {"a\\e[2Jb": {}}', "c\x1b[2Jd\u009b", folder=folder)
    assert re.search(r"[^\n -~\xa0-\U0010ffff]", text) is None
    assert "a\ufffd[2Jb" in text


# --- the source


@pytest.mark.parametrize(
    ("watch", "line"),
    [("true", "looked at every 2s"), ("false", "looked at at start and on SIGHUP (watch_config is false)")],
)
def test_it_says_that_the_file_decided(watch: str, line: str) -> None:
    path = EXAMPLES / "matrix.yaml"
    assert section(check(path, watch_config=watch), "llama-swap") == [
        f"names from {path}, not from the listing of a running llama-swap",
        line,
        "routing matrix",
        "apiKeys none",
    ]


def test_it_says_that_nothing_but_the_settings_decided_and_that_serve_will_ask_for_the_listing() -> None:
    text = report(*read(None, QUIET))
    assert "llama_swap_config is unset" in text
    assert "GET /v1/models" in text
    assert "Loaded together" not in text


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("models: {a: {}}", "routing none is configured, so that every model stops every other"),
        ("models: {a: {}}\ngroups: {g: {members: [a]}}", "routing groups"),
        (MATRIX, "routing matrix"),
    ],
)
def test_it_names_the_router(config: str, expected: str, folder: str) -> None:
    assert expected in section(check(config, folder=folder), "llama-swap")


def test_slots_that_are_not_set_are_said_to_be_llama_swaps() -> None:
    assert "slots each model's concurrencyLimit llama_swap_config" in section(
        "\n" + check(EXAMPLES / "groups.yaml"), "Settings"
    )
    assert "slots 7 GPU_LEASE_SLOTS" in section("\n" + check(EXAMPLES / "groups.yaml", slots="7"), "Settings")


# --- other names, and what is loaded together


def test_selectors_profiles_and_peers_are_listed_with_what_they_mean(folder: str) -> None:
    config = """
models: {a: {}, b: {}, c: {}}
groups: {g: {swap: false, members: [b, c]}}
selectors: {any: {strategy: warm, targets: [a, b]}, both: {strategy: spillover, targets: [b, c]}}
profiles: {night: {pins: {a: b, c: ''}}}
peers: {there: {proxy: http://there, models: [far, near]}}
"""
    assert section(check(config, folder=folder), "Other names") == [
        "NAME KIND MEANING",
        "any warm selector a, b",
        "lease: write, any may choose any of its targets, which cannot all be resident at once",
        "both spillover selector b, c",
        "lease: read, llm shares with what is resident beside it",
        "there peer no lease, no slots: far, near",
        "night profile while it is active: a is b, c is switched off",
    ]


def test_what_can_be_loaded_together_is_listed_and_what_always_is() -> None:
    assert section(check(EXAMPLES / "matrix.yaml"), "Loaded together") == [
        "e, q27",
        "e, tts",
        "e, vis",
        "Always, so that no request waits for another model's: e",
    ]


def test_of_many_sets_only_some_are_listed(folder: str) -> None:
    config = f"models: {{{', '.join(f'm{number}: {{}}' for number in range(MOST_SETS + 5))}}}"
    found = section(check(config, folder=folder), "Loaded together")
    assert len(found) == MOST_SETS + 2
    assert found[-2:] == [
        *(f"and more: only {MOST_SETS} are shown", "Always, so that no request waits for another model's: none")
    ]


def test_a_matrix_of_too_many_combinations_is_refused_in_one_line(folder: str) -> None:
    def matrix(pairs: int) -> str:
        models = [f"{side}{number}" for number in range(pairs) for side in "lr"]
        sets = " & ".join(f"(l{number} | r{number})" for number in range(pairs))
        return f"models: {{{', '.join(f'{model}: {{}}' for model in models)}}}\nmatrix: {{sets: {{big: {sets!r}}}}}"

    assert section(check(matrix(13), folder=folder), "Loaded together")[MOST_SETS].startswith("and more")
    with pytest.raises(SettingsError) as caught:
        check(matrix(14), folder=folder)
    (problem,) = caught.value.problems
    assert problem.endswith("matrix.sets: the sets stand for 16384 combinations; at most 10000 can be compared")


# --- warnings


@pytest.mark.parametrize(
    ("config", "values", "expected"),
    [
        (
            "models: {a: {}, nomic-embed: {}}",
            {},
            "nomic-embed is not always resident; add the group `always: {swap: false, exclusive: false, "
            "persistent: true, members: [nomic-embed]}` to llama-swap's groups.",
        ),
        (
            'models: {a: {}, b: {}, my-embed: {}}\nmatrix: {sets: {main: "a | b & my-embed"}}',
            {},
            "my-embed is not always resident; end every set of the matrix with `& my-embed`",
        ),
        ("models: {a: {concurrencyLimit: 2}}", {"slots": "3"}, "slots of a is 3, above its concurrencyLimit, 2"),
        ("models: {a: {}}", {"classes__tts__models": "speaker"}, "classes.tts.models has speaker, which fits no name"),
        ("models: {a: {}}", {"slots": '{"b*": 1, "a": 2}'}, "slots has b*, which fits no name"),
        ("apiKeys: [k]\nmodels: {a: {}}", {"upstream_api_key": "other"}, "upstream_api_key is none of llama-swap's"),
        ("models: {a: {}}\nmodells: {}", {}, "llama-swap's configuration, top level: unknown: modells."),
        (
            "models: {a: {}}\nrouting: {router: {settings: {matrix: {}}}}",
            {},
            "llama-swap passes it over without `use: matrix` in routing.router.",
        ),
    ],
)
def test_warnings(config: str, values: dict[str, Any], expected: str, folder: str) -> None:
    assert expected in " ".join(section(check(config, folder=folder, **values), "Warnings"))


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (MATRIX, {}),
        ("models: {a: {concurrencyLimit: 3}}", {"slots": "3"}),
        ("models: {a: {aliases: [speaker]}}", {"classes__tts__models": "speaker"}),
        ("apiKeys: [k]\nmodels: {a: {}}", {"upstream_api_key": "k", "listen_host": "0.0.0.0"}),
        ("models: {a: {}}", {"default_class": "embed", "classes__embed__lease": "read"}),
    ],
)
def test_nothing_to_warn_of(config: str, values: dict[str, Any], folder: str) -> None:
    assert section(check(config, folder=folder, **values), "Warnings") == ["none"]


def test_a_line_to_copy_is_not_broken(folder: str) -> None:
    text = check("models: {a: {}, a-model-with-quite-a-long-name-of-its-own-embed: {}}", folder=folder)
    assert "`always: {swap: false, exclusive: false, persistent: true, members: [" in text


# --- secrets and mistakes


@pytest.mark.parametrize(
    ("config", "environ"),
    [
        ("apiKeys: [hunter2]\nmodels: {a: {}}", {}),
        ("apiKeys: ['${env.KEY}']\nmodels: {a: {}}", {"KEY": "hunter2"}),
        ("apiKeys: ['${env.KEY}']\nmodels: {a: {cmd: '${env.KEY} ${env.OTHER}', madeup: 1}}", {"KEY": "hunter2"}),
        ("apiKeys: [k]\nmodels: {a: {}}\npeers: {p: {proxy: http://p, apiKey: hunter2, models: [x]}}", {}),
        ("apiKeys: [k]\nmacros: {secret: hunter2}\nmodels: {a: {cmd: 'x ${secret}', env: [KEY=hunter2]}}", {}),
    ],
)
def test_no_secret_of_llama_swap_is_printed(config: str, environ: dict[str, str], folder: str) -> None:
    text = check(config, environ=environ, folder=folder)
    assert "hunter2" not in text
    assert "apiKeys 1 (not shown); a client must send one of them" in section(text, "llama-swap")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ("models: [a", ["line"]),
        ("models: {a: {}, '${env.NAME}': {}}", ["the environment variable NAME is not set here"]),
        ("apiKeys: ['${env.KEY}']\nmodels: {a: {}}", ["apiKeys: the environment variable KEY is not set here"]),
        (
            "models: {a: {concurrencyLimit: many, aliases: [a b, x]}, b: {aliases: [x]}}",
            ["models.a.concurrencyLimit", "models.b.aliases"],
        ),
    ],
)
def test_each_mistake_of_llama_swaps_configuration_is_one_line(config: str, expected: list[str], folder: str) -> None:
    with pytest.raises(SettingsError) as caught:
        check(config, folder=folder)
    found: Any = caught.value.problems
    assert len(found) == len(expected)
    for problem, part in zip(sorted(found), expected, strict=True):
        assert problem.startswith(f"{folder}/llama-swap.yaml: ")
        assert part in problem
        assert "\n" not in problem
