"""Credentials among a script's arguments, its variables and what it prints: they are masked, and nothing else is."""

import pytest

from autotune.data.printable import credential_values, mask_arguments, mask_text, recorded_variables


@pytest.mark.parametrize(
    ("arguments", "masked"),
    [
        ("--token=abc", "--token=***"),
        ("--token abc --epochs 3", "--token *** --epochs 3"),
        ("--api-key -abc --lr 0.1", "--api-key *** --lr 0.1"),
        ("--apiKey abc", "--apiKey ***"),
        ("--hf_token abc", "--hf_token ***"),
        ("--password abc", "--password ***"),
        ("-password abc", "-password ***"),
        ("db.password=abc", "db.password=***"),
        ("AWS_SECRET_ACCESS_KEY=abc", "AWS_SECRET_ACCESS_KEY=***"),
        ("AWS_SECRET=abc", "AWS_SECRET=***"),
        ("--db postgres://me:abc/d@host:1/db", "--db postgres://me:***@host:1/db"),
        ("--db=postgres://me:a@bc@host:1/db", "--db=postgres://me:***@host:1/db"),
        ("s3://data?access_key=abc&part=2", "s3://data?access_key=***&part=2"),
        ("ghp_0123456789abcdefghij", "***"),
        ("--key AKIAIOSFODNN7EXAMPLE", "--key ***"),
        ('{"api_key":"abc","n":2}', '{"api_key":"***","n":2}'),
        ("--header=Authorization:abc", "--header=Authorization:***"),
    ],
)
def test_what_looks_like_a_credential_is_masked(arguments, masked):
    assert mask_arguments(arguments.split()) == tuple(masked.split())
    assert mask_arguments(masked.split()) == tuple(masked.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "--epochs 3 --batch-size 64",
        "--tokenizer bpe --max-tokens 512 --num_tokens=9 --token-length 3 --pad-token=<pad>",
        "--token --epochs 3",
        "--token-file /run/secrets/token --key-frames 3 --monkey abc --authors abc --secretary abc",
        "https://host:8080/data@2.csv ssh://git@host/repository",
        "--loss mse --keys a,b --compass north",
    ],
)
def test_what_is_none_stays(arguments):
    assert mask_arguments(arguments.split()) == tuple(arguments.split())


def test_values_are_found_again_in_what_a_script_prints():
    values = credential_values(["--token=hunter22", "--password", "abc"], {"DB_PASSWORD": "swordfish", "N": "1234567"})
    assert set(values) == {"hunter22", "swordfish"}
    text = "error: no choice hunter22; swordfish; N 1234567; https://me:secret@host/"
    assert mask_text(text, values) == "error: no choice ***; ***; N 1234567; https://me:***@host/"


def test_only_variables_that_affect_speed_keep_their_values():
    given = {"TF_NUM_INTEROP_THREADS": "2", "OMP_NUM_THREADS": "1", "DB_PASSWORD": "abc", "HOME_TOWN": "abc"}
    assert recorded_variables({**given, "TF_TOKEN": "abc"}) == {
        "TF_NUM_INTEROP_THREADS": "2",
        "OMP_NUM_THREADS": "1",
        "DB_PASSWORD": "***",
        "HOME_TOWN": "***",
        "TF_TOKEN": "***",
    }
