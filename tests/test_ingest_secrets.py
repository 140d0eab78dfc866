"""Secrets, hosts, users and environments that stand in a source reach no output: no file, no message, no error."""

import argparse
import json
from pathlib import Path

import pytest

from specmodel.cli import main
from specmodel.engines import command
from specmodel.engines.redact import clean, gpu_name, model_name, sweep, tuning_variable, version_of
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


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA A100-SXM4-80GB MIG 1g.10gb"),
        ("AMD Instinct MI300X", "AMD Instinct MI300X"),
        ("Intel(R) Arc(TM) Pro B70 (BMG)", "Intel(R) Arc(TM) Pro B70 (BMG)"),
        ("H200", "H200"),
        (f"NVIDIA H200 {SECRETS['password']}", "NVIDIA H200"),
        (f"NVIDIA H200 of {SECRETS['user']}", "NVIDIA H200"),
        (SECRETS["host"], None),
        (SECRETS["user"], None),
        (SECRETS["path"], None),
        ("", None),
    ],
)
def test_names_of_gpus(text, name):
    assert gpu_name(text) == name


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("v0.5.18", "0.5.18"),
        ("0.5.3.post2", "0.5.3.post2"),
        ("0.26.1rc2.dev3+g1eee8fb", "0.26.1rc2.dev3+g1eee8fb"),
        ("0.5.1.1", "0.5.1.1"),
        (SECRETS["inner address"], None),
        ("192.168.0.7", None),
        (SECRETS["password"], None),
        ("", None),
    ],
)
def test_versions_are_no_addresses(text, version):
    assert version_of(text) == version


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        ("Ring", True),
        ("Ring,Tree", True),
        ("^NVLS,NVLSTree", True),
        ("allreduce:ring;allgather:ring,pat", True),
        ("LL128", True),
        ("-2", True),
        ("4194304", True),
        ("0x20", True),
        ("SYS", True),
        (f"Ring,{SECRETS['host']}", False),
        (SECRETS["user"], False),
        (SECRETS["password"], False),
        (SECRETS["hex key"], False),
        ("", False),
    ],
)
def test_values_that_tune_nccl(value, kept):
    assert tuning_variable("NCCL_ALGO", value) is kept


ERRORS = {
    "no such file": ["{secret}.log"],
    "a name": ["{log}", "--name", "{secret}"],
}


@pytest.mark.parametrize("what", ["openai key", "hugging face token", "github token", "aws key", "json web token"])
@pytest.mark.parametrize("where", ["no such file", "a name"])
def test_secrets_in_what_is_typed(where, what, tmp_path, capsys):
    log = tmp_path / "x.log"
    log.write_bytes((DATA / "sglang_v0518_eagle3_tp8_clean.log").read_bytes())
    words = [word.format(secret=SECRETS[what], log=log) for word in ERRORS[where]]
    assert SECRETS[what] not in outputs(words, capsys)


LATER = ["fit", "predict", "optimize", "validate"]


@pytest.mark.parametrize("name", ["sglang_bench_speculative.jsonl", "sglang_v0518_eagle3_tp8_clean.log"])
def test_no_command_on_what_was_ingested_shows_a_secret(name, tmp_path, capsys):
    """Secrets among the records, then every command that reads the calibration, as a screen and as an object."""
    path, calib = tmp_path / name, tmp_path / "calib.yaml"
    text = (DATA / name).read_text()
    lines = text.splitlines()
    if name.endswith("jsonl"):
        lines = [json.dumps({**json.loads(line), **ENVIRONMENT, "run_name": SECRETS["user"]}) for line in lines]
        path.write_text("\n".join(lines) + "\n")
    else:
        path.write_text(planted(text))
    assert main(["ingest", str(path), "-o", str(calib)]) == 0
    assert_no_secret(calib.read_text() + "".join(capsys.readouterr()))
    for word in LATER:
        for more in ([], ["--json"]):
            main([word, str(calib), *more])
            assert_no_secret("".join(capsys.readouterr()))


def test_secrets_of_a_calibration_reach_no_launch_line(tmp_path, capsys):
    setting = {
        "env": {**ENVIRONMENT, "NCCL_PROTO": "LL"},
        "flags": [
            f"--api-key={SECRETS['openai key']}",
            f"--hf-token {SECRETS['hugging face token']}",
            "--tokenizer-mode x",
        ],
    }
    document = {
        "schema": "specmodel.calibration/1",
        "name": "planted",
        "system": {"engine": "sglang"},
        "comm": {"default": setting},
        "measurements": {"cycles": [{"num_steps": k, "tok_s": 100.0 + 20 * k} for k in range(4)]},
    }
    path = tmp_path / "planted.json"
    path.write_text(json.dumps(document))
    kinds = ("openai key", "hugging face token", "github token", "aws secret", "password")
    for more in ([], ["--json"], ["--engine", "vllm"], ["--engine", "sglang", "--json"]):
        assert main(["optimize", str(path), *more]) == 0
        said = "".join(capsys.readouterr())
        assert [kind for kind in kinds if SECRETS[kind] in said] == [], said
        assert "--tokenizer-mode" in said or "vllm" in more


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
