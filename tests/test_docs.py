"""What the docs tell one to type is what the program takes."""

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
    """What stands behind `train.py` in every line of the page and the README that runs it."""
    text, found = (PAGE + (ROOT / "README.md").read_text()).replace("\\\n", " "), []
    for said in re.findall(r"python train\.py ([^`\n]*)", text):
        said = (
            said.removesuffix("'") if said.count("'") % 2 else said
        )  # the end of a command for another machine
        found.append(shlex.split(said, comments=True))
    return found


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_line_is_one_that_the_program_takes(words):
    config = json.loads((ROOT / "config.json").read_text())
    for text in train.parse(words).overrides:
        config = override(config, text)
        assert text.split(".")[0].split("=")[0] in TOP_LEVEL
    DistributedOptions(**config.get("distributed", {}))


def test_the_keys_are_those_of_a_config():
    (block,) = BLOCKS["json"]
    keys = json.loads("{" + block + "}")
    assert keys.keys() <= TOP_LEVEL.keys()
    for rules in re.findall(r"^\| `(.+?)` \|", PAGE, re.MULTILINE):
        check_sharding(json.loads(rules))


def test_the_scripts_can_be_read():
    (script,), (manifest,) = BLOCKS["bash"], BLOCKS["yaml"]
    checked = subprocess.run(
        [shutil.which("bash"), "-n"],
        input=script,
        capture_output=True,
        text=True,
        timeout=10,
        check=False,
    )
    assert not checked.stderr
    job = yaml.safe_load(manifest)["spec"]["replicatedJobs"][0]
    pod = job["template"]["spec"]["template"]["spec"]["containers"][0]
    told = {variable["name"]: variable.get("value") for variable in pod["env"]}
    name = f"{yaml.safe_load(manifest)['metadata']['name']}-{job['name']}-0-0"
    assert told["JAX_COORDINATOR_ADDRESS"].startswith(f"{name}.")
    assert (
        told["JAX_NUM_PROCESSES"]
        == str(job["template"]["spec"]["completions"])
        == str(job["template"]["spec"]["parallelism"])
    )
    assert train.parse(pod["command"][2:]).resume == "auto"


def test_links_are_there():
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert target.startswith("https://") or (ROOT / "docs" / target).exists(), target
