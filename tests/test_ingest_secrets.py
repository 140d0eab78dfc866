"""Secrets, hosts, users and environments that stand in a source reach no output: no file, no message, no error."""

import argparse
import json
from pathlib import Path

import pytest

from specmodel.engines import command
from specmodel.engines.redact import clean, model_name, sweep
from specmodel.errors import SpecModelError

DATA = Path(__file__).parent / "data" / "engines"
SECRETS = {
    "openai key": "sk-live-7hQ2mZr9TtBvK3xW",
    "hugging face token": "hf_qWerTYuiOPasDFghJKlzXcVBnm123456",
    "github token": "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
    "aws key": "AKIAIOSFODNN7EXAMPLE",
    "aws secret": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "json web token": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbGljZSJ9.s5Wd0mYt1",
    "password": "hunter2-Tr0ub4dor",
    "user": "alice.liddell",
    "host": "gpu-node-a",
    "inner address": "10.20.30.40",
    "mail": "alice@wonderland.example",
    "path": "/data/alice.liddell/private",
    "hex key": "5f4dcc3b5aa765d61d8327deb882cf99",
}
ENVIRONMENT = {
    "OPENAI_API_KEY": SECRETS["openai key"],
    "HF_TOKEN": SECRETS["hugging face token"],
    "GITHUB_TOKEN": SECRETS["github token"],
    "AWS_ACCESS_KEY_ID": SECRETS["aws key"],
    "AWS_SECRET_ACCESS_KEY": SECRETS["aws secret"],
    "SESSION": SECRETS["json web token"],
    "DB_PASSWORD": SECRETS["password"],
    "USER": SECRETS["user"],
    "HOSTNAME": SECRETS["host"],
    "MASTER_ADDR": SECRETS["inner address"],
    "GIT_AUTHOR_EMAIL": SECRETS["mail"],
    "HOME": SECRETS["path"],
    "NCCL_SOCKET_IFNAME": SECRETS["host"],
    "NCCL_COMM_ID": f"{SECRETS['inner address']}:1234",
    "NCCL_TOPO_FILE": f"{SECRETS['path']}/topo.xml",
    "NCCL_HOSTID": SECRETS["hex key"],
    "NCCL_ALGO": "Ring",
}


def outputs(argv, capsys):
    """Everything that a run lets out: the file on stdout, the talk, the error."""
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    try:
        command.run(parser.parse_args([str(word) for word in argv]))
        error = ""
    except SpecModelError as caught:
        error = str(caught)
    captured = capsys.readouterr()
    return captured.out + captured.err + error


def assert_no_secret(text):
    for what, secret in SECRETS.items():
        assert secret not in text, what
    assert "wonderland" not in text


def planted(text):
    """The text with secrets before, after, between and inside its lines, as logs have them."""
    environment = "\n".join(f"{name}={value}" for name, value in ENVIRONMENT.items())
    dictionary = str(ENVIRONMENT)
    nccl = "\n".join(
        f"{SECRETS['host']}:31004:31004 [0] NCCL INFO {name} set by environment to {value}"
        for name, value in ENVIRONMENT.items()
        if name.startswith("NCCL_")
    )
    lines = text.splitlines()
    middle = len(lines) // 2
    prefix = f"{SECRETS['host']} {SECRETS['user']}@{SECRETS['inner address']} | "
    marked = [prefix + line if i % 3 == 0 else line for i, line in enumerate(lines)]
    return "\n".join([environment, *marked[:middle], dictionary, nccl, *marked[middle:], environment]) + "\n"


LOGS = [
    "sglang_v0518_eagle3_tp8_clean.log",
    "sglang_v0510_eagle3_tree_tp8_noisy_truncated.log",
    "vllm_v1_eagle3.log",
    "trtllm_iter.log",
    "llamacpp_server_new.log",
    "llamacpp_speculative_simple.txt",
    "vllm_spec_decode_offline.txt",
    "nccl_debug_info.log",
    "nccl_all_reduce_8gpu.txt",
]


@pytest.mark.parametrize("name", LOGS)
def test_secrets_among_the_lines_of_a_log(name, tmp_path, capsys):
    path = tmp_path / f"log-{SECRETS['hugging face token']}.log"
    path.write_text(planted((DATA / name).read_text()))
    text = outputs([path, "--num-steps", 3], capsys)
    assert "schema: specmodel.calibration/1" in text
    assert_no_secret(text)


def test_secrets_in_the_arguments_of_servers(tmp_path, capsys):
    sglang = (DATA / "sglang_v0518_eagle3_tp8_clean.log").read_text()
    sglang = sglang.replace(
        "tp_size=8",
        f"api_key='{SECRETS['openai key']}', admin_api_key='{SECRETS['password']}', host='{SECRETS['host']}', "
        f"dist_init_addr='{SECRETS['inner address']}:5000', log_file='{SECRETS['path']}/x', tp_size=8",
    ).replace("/models/", f"{SECRETS['path']}/{SECRETS['user']}/")
    vllm = (DATA / "vllm_v1_eagle3.log").read_text()
    vllm = vllm.replace(
        "'max_model_len': 16384",
        f"'api_key': ['{SECRETS['openai key']}'], 'hf_token': '{SECRETS['hugging face token']}'",
    ).replace("/models/", f"{SECRETS['path']}/")
    for name, text in (("a.log", sglang), ("b.log", vllm)):
        path = tmp_path / name
        path.write_text(text)
        out = outputs([path], capsys)
        assert "target: Llama-3.3-70B-Instruct-FP8" in out
        assert_no_secret(out)


def with_secrets(document):
    if isinstance(document, dict):
        out = {key: with_secrets(value) for key, value in document.items()}
        return {**ENVIRONMENT, **out, "env": [f"{k}={v}" for k, v in ENVIRONMENT.items()]}
    return [with_secrets(item) for item in document] if isinstance(document, list) else document


@pytest.mark.parametrize(
    "name",
    [
        "nccl_all_reduce_2gpu.json",
        "sglang_v0518_server_info.json",
        "trtllm_metrics.json",
        "trtllm_bench_report.json",
        "vllm_bench_serve.json",
        "llamacpp_timings.json",
    ],
)
def test_secrets_at_every_level_of_a_document(name, tmp_path, capsys):
    path = tmp_path / name
    path.write_text(json.dumps(with_secrets(json.loads((DATA / name).read_text()))))
    text = outputs([path], capsys)
    assert "schema: specmodel.calibration/1" in text
    assert_no_secret(text)


@pytest.mark.parametrize("name", ["sglang_v0518_metrics.prom", "llamacpp_metrics.prom"])
def test_secrets_in_labels(name, tmp_path, capsys):
    labels = ",".join(f'{key.lower()}="{value}"' for key, value in ENVIRONMENT.items())
    text = (DATA / name).read_text().replace("{", "{" + labels + ",")
    path = tmp_path / name
    path.write_text(text)
    out = outputs([path], capsys)
    assert "schema: specmodel.calibration/1" in out
    assert_no_secret(out)


@pytest.mark.parametrize(
    "text",
    [
        "{{'a': '{0}'}}",
        '{{"timings": {{"predicted_n": "{0}", "predicted_ms": "{0}"}}}}',
        '{{"spec_decode_num_drafts": 3, "{0}": }}',
        "speculative_config:\n  {0}: [\n",
        "{0}",
        "server_args=ServerArgs(model_path='{0}', api_key='{0}'",
    ],
)
@pytest.mark.parametrize("secret", sorted(SECRETS))
def test_secrets_in_what_cannot_be_read(text, secret, tmp_path, capsys):
    path = tmp_path / "x.log"
    path.write_text(text.format(SECRETS[secret]))
    out = outputs([path], capsys)
    if (secret != "user" and secret != "host" and secret != "password") or "model_path" not in text:
        assert SECRETS[secret] not in out


def test_the_sweep_leaves_what_readers_write(capsys):
    for path in DATA.iterdir():
        if path.name not in ("README.md", "expected.json"):
            assert "[redacted]" not in outputs([path], capsys)


def test_sweep_reaches_keys_and_nests():
    swept = sweep(
        {"a": [{"note": f"Bearer {SECRETS['aws secret']}"}], SECRETS["openai key"]: 1, "engine_version": "0.5.1.1"}
    )
    assert SECRETS["aws secret"] not in str(swept)
    assert SECRETS["openai key"] not in str(swept)
    assert swept["engine_version"] == "0.5.1.1"
    assert (
        clean("accept len / num_draft_tokens, 4 tokens a sequence")
        == "accept len / num_draft_tokens, 4 tokens a sequence"
    )


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Llama-3.3-70B-Instruct-FP8", "Llama-3.3-70B-Instruct-FP8"),
        ("meta-llama/Llama-3.1-8B", "Llama-3.1-8B"),
        ("/cache/huggingface/hub/models--meta-llama--Llama-3.1-8B/snapshots/0e9e39f249a16976", "Llama-3.1-8B"),
        ("C:\\models\\x.gguf", "x.gguf"),
        ("None", None),
        ("", None),
        ("/models/", "models"),
    ],
)
def test_models_lose_their_folders_and_owners(path, name):
    assert model_name(path) == name
