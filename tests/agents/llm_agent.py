"""The command `llm` asks about the weather with tools, streamed and not.

python llm_agent.py BASE_URL MODEL
"""

import inspect
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from weather import QUESTION, get_weather


def main(base_url: str, name: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        model = {"model_id": "mine", "model_name": name, "api_base": base_url, "supports_tools": True}
        # YAML's flow style is JSON.
        Path(folder, "extra-openai-models.yaml").write_text(json.dumps([model]))
        functions = Path(folder, "functions.py")
        functions.write_text(inspect.getsource(get_weather))
        command = [sys.executable, "-m", "llm", "-m", "mine", "-s", "Be brief.", "-T", "llm_version"]
        command += ["--functions", str(functions), "--no-log", QUESTION]
        environment = {**os.environ, "LLM_USER_PATH": folder, "OPENAI_API_KEY": "none"}
        return [
            subprocess.run(
                [*command, *more], env=environment, check=True, capture_output=True, text=True
            ).stdout.strip()
            for more in ([], ["--no-stream"])
        ]


print(json.dumps(main(*sys.argv[1:])))
