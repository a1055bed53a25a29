"""A tokenizer keeps what the model's files say, loads without torch, and renders chats as its template says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cluster.text.conversation import Conversation, Turn
from cluster.text.formats import ModelFormats
from cluster.text.prompt_encoder import render
from cluster.text.tokenizer import Tokenizer
from configs.errors import CheckpointError, ConfigError, RequestError

PROMPT = Conversation(turns=[Turn(role="user", text="x")])


def test_the_default_model_has_a_template_and_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.template is not None
    assert "<|im_start|>" in smollm2.template.source
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2._special_ids == frozenset(range(17))
    assert smollm2.vocab_size == 49152


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("In 2024, x12345!", [788, 216, 34, 32, 34, 36, 28, 1792, 33, 34, 35, 36, 37, 17]),
        ("½ ²Ⅷ", [16738, 216, 19133, 173, 223, 117]),
        ("日本語", [23274, 115, 40993, 179, 120, 248]),
        ("<|im_start|>user\nI'm<|im_end|>\n", [1, 4093, 198, 57, 5248, 2, 198]),
        ("a  b\n\n\tc", [81, 216, 278, 1116, 197, 83]),
    ],
)
def test_the_default_model_has_the_ids_of_its_publishers_tokenizer(
    smollm2: Tokenizer, text: str, ids: list[int]
) -> None:
    assert smollm2.encode(text, add_special_tokens=True) == ids


def test_other_threads_go_on_while_a_long_text_is_encoded_and_decoded(smollm2: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    ids = smollm2.encode(text, add_special_tokens=False)

    def num_turns(work: Callable[[], object]) -> int:
        thread = threading.Thread(target=work)
        thread.start()
        turns = 0
        while thread.is_alive():
            turns += 1
            time.sleep(0.001)
        return turns

    # Each takes 70 ms or more. Where the GIL was held, one turn was all there was. Other work may keep this thread from
    # its turns.
    assert any(num_turns(lambda: smollm2.encode(text, add_special_tokens=False)) > 8 for _ in range(10))
    assert any(num_turns(lambda: smollm2.decode(ids * 4)) > 8 for _ in range(10))


def test_loading_it_imports_no_torch_and_writes_nothing(smollm2_path: Path, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer"
    path.symlink_to(smollm2_path)
    script = (
        "import sys; from cluster.text.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(sys.argv[1]); t.template.render([{'role': 'user', 'content': 'x'}])\n"
        "sys.exit(int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=Path.cwd(), check=False, timeout=120)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing is no directory"):
        Tokenizer.load(tmp_path / "nothing")


def test_a_directory_with_a_models_shape_alone_has_no_tokenizer() -> None:
    models = Path(__file__).parents[2] / "benchmarks" / "models"
    with pytest.raises(CheckpointError, match=r"qwen3-8b holds no tokenizer; set `tokenizer`"):
        Tokenizer.load(models / "qwen3-8b")


def test_the_servers_chat_template_takes_the_place_of_the_models(smollm2_path: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    tokenizer = Tokenizer.load(smollm2_path, chat_template=str(template))
    assert render(PROMPT, tokenizer.template, ModelFormats()) == "[user:x]"
    with pytest.raises(ConfigError, match=r"server\.chat_template"):
        Tokenizer.load(smollm2_path, chat_template=str(tmp_path / "absent.jinja"))


def test_a_chat_is_rendered_as_the_template_says(smollm2: Tokenizer) -> None:
    text = render(Conversation(turns=[Turn(role="user", text="hi")]), smollm2.template, ModelFormats())
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode(text, add_special_tokens=False)
    assert ids[0] == smollm2.bos_token_id
    assert ids[1] != smollm2.bos_token_id
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_a_template_that_refuses_or_breaks_is_the_callers_error(smollm2_path: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    for source, match in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
    ]:
        template.write_text(source)
        tokenizer = Tokenizer.load(smollm2_path, chat_template=str(template))
        with pytest.raises(RequestError, match=match):
            render(PROMPT, tokenizer.template, ModelFormats())


def test_a_model_without_chat_template_says_so(smollm2_path: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(smollm2_path, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    os.remove(bare / "chat_template.jinja")
    with pytest.raises(RequestError, match="no chat template") as caught:
        render(PROMPT, Tokenizer.load(bare).template, ModelFormats())
    assert caught.value.code == "no_chat_template"


def test_encoding_from_several_threads_gives_the_same_ids(smollm2: Tokenizer) -> None:
    texts = [f"text {i} " * 200 for i in range(16)]
    expected = [smollm2.encode(text, add_special_tokens=False) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: smollm2.encode(text, add_special_tokens=False), texts * 4)) == expected * 4
