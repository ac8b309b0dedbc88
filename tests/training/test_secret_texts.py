"""Tests of the rule by which secrets are known and replaced, in variables, commands and texts."""

from __future__ import annotations

import shlex

import pytest

from perdure_training.secret_texts import command_without_secrets, is_secret, secrets_in, without_secrets
from tests.support.processor_time import ends_within


@pytest.mark.parametrize(
    ("command", "shown", "names"),
    [
        ("train.py --token abc --lr 1", "train.py --token [redacted] --lr 1", ["--token"]),
        ("train.py --hub-token=abc", "train.py --hub-token=[redacted]", ["--hub-token"]),
        ("train.py --wandb.api_key abc --password a=b", "train.py --wandb.api_key [redacted] --password [redacted]",
         ["--wandb.api_key", "--password"]),
        ("env HF_TOKEN=abc A_KEY=k python t.py", "env HF_TOKEN=[redacted] A_KEY=[redacted] python t.py",
         ["HF_TOKEN", "A_KEY"]),
        ("train.py hub.token=abc +db.password=x", "train.py hub.token=[redacted] +db.password=[redacted]",
         ["hub.token", "+db.password"]),
        ("wget https://me:hunter2@host/x", "wget https://[redacted]@host/x", [""]),
        ("train.py --key hf_swordfishswordfishsword", "train.py --key [redacted]", [""]),
        ("bash -c 'HF_TOKEN=abc torchrun t.py --api-key x --lr 1'",
         "bash -c 'HF_TOKEN=[redacted] torchrun t.py --api-key [redacted] --lr 1'", [""]),
        ("bash -lc 'TOKEN=\"a b\" torchrun t.py'", "bash -lc 'TOKEN=\"[redacted]\" torchrun t.py'", [""]),
    ],
)  # fmt: skip
def test_secrets_of_a_command_are_found_and_replaced(command: str, shown: str, names: list[str]):
    words = shlex.split(command)
    assert command_without_secrets(words) == shlex.split(shown)
    assert [word.name for word in secrets_in(words)] == names
    assert command_without_secrets(shlex.split(shown)) == shlex.split(shown), "nothing is replaced twice"


@pytest.mark.parametrize(
    "command",
    [
        "torchrun --nproc-per-node=2 train.py --tokenizer gpt2 --max-tokens 512",
        "train.py --eos_token </s> --pad-token=[PAD] --mask_token <mask> --max-token 5",
        "train.py --image_key image data.prompt_key=prompt --sort-key=length",
        "train.py --token-file /run/token --password-stdin --secret_name hf",
        "train.py --token $HF_TOKEN --hub_token ${HUB} --use_auth_token true --token",
        "bash -c 'torchrun t.py --token $HF_TOKEN --eos_token </s>; export HF_TOKEN=$(cat /run/token)'",
        "train.py s3://bucket/a https://host:80/x user@host:/folder",
    ],
)
def test_words_that_are_no_secrets_stay(command: str):
    words = shlex.split(command)
    assert command_without_secrets(words) == words


def test_a_variable_is_a_secret_by_its_name_or_by_the_form_of_its_value():
    assert is_secret("HF_TOKEN", "x")
    assert is_secret("DATABASE_URL", "postgres://me:hunter2@db/x")
    assert not is_secret("HF_TOKEN", "$OTHER_TOKEN")
    assert not is_secret("DATABASE_URL", "postgres://db/x")


def test_an_option_that_argparse_does_not_know_is_replaced_in_its_error():
    error = "t.py: error: unrecognized arguments: --token abc https://me:hunter2@host/x"
    assert without_secrets(error) == "t.py: error: unrecognized arguments: --token [redacted] https://[redacted]@host/x"


@pytest.mark.parametrize(
    "text",
    [
        "-",
        "a-",
        "token",
        "token ",
        "--token ",
        "://",
        "x:",
        "eyJ",
        "eyJaaaaaaaa.",
        "-----BEGIN ",
        "A ",
        "token='",
        "api_",
    ],
)
@pytest.mark.parametrize("begin", ["", "--", "://", "-----BEGIN ", "--token"])
def test_a_text_that_repeats_parts_of_a_form_is_read_in_linear_time(begin: str, text: str):
    assert ends_within(10, without_secrets, begin + text * 20_000)
