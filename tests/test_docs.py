"""The program accepts the commands, config keys and scripts that the docs show."""

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

import train
from training.devices.options import DistributedOptions, check_sharding
from wiring.config import TOP_LEVEL, override

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "many_devices.md").read_text()
BLOCKS = {
    language: re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)
    for language in ("bash", "yaml", "json")
}


def commands():
    """The arguments of every `train.py` command on the page and in the README."""
    text, arguments = (PAGE + (ROOT / "README.md").read_text()).replace("\\\n", " "), []
    for line in re.findall(r"python train\.py ([^`\n]*)", text):
        # An odd quote ends a quoted command for another machine.
        line = line.removesuffix("'") if line.count("'") % 2 else line
        arguments.append(shlex.split(line, comments=True))
    return arguments


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_program_accepts_every_command_line(words):
    config = json.loads((ROOT / "config.json").read_text())
    for text in train.parse(words).overrides:
        config = override(config, text)
        assert text.split(".")[0].split("=")[0] in TOP_LEVEL
    DistributedOptions(**config.get("distributed", {}))


def test_the_json_block_has_valid_config_keys_and_sharding_rules():
    (block,) = BLOCKS["json"]
    keys = json.loads("{" + block + "}")
    assert keys.keys() <= TOP_LEVEL.keys()
    for rules in re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE):
        check_sharding(json.loads(rules))


def test_the_scripts_are_valid():
    (script,), (manifest,) = BLOCKS["bash"], BLOCKS["yaml"]
    checked = subprocess.run(
        [shutil.which("bash"), "-n"], input=script, capture_output=True, text=True, timeout=10
    )
    assert not checked.stderr
    job = yaml.safe_load(manifest)["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]["containers"][0]
    variables = {variable["name"]: variable.get("value") for variable in pod["env"]}
    name = f"{yaml.safe_load(manifest)['metadata']['name']}-{job['name']}-0-0"
    assert variables["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}.")
    spec = job["template"]["spec"]
    processes = variables["JAX_NUM_PROCESSES"]
    assert processes == str(spec["completions"]) == str(spec["parallelism"])
    assert train.parse(pod["command"][2:]).resume == "auto"


def test_the_targets_of_links_exist():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target
