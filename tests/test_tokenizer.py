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


@pytest.fixture(scope="module")
def directory(smollm2: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's tokenizer as a directory."""
    path = tmp_path_factory.mktemp("tokenizer")
    smollm2._fast.save_pretrained(path)
    return path


def test_a_gguf_keeps_template_and_special_tokens(smollm2: Tokenizer) -> None:
    assert smollm2.template is not None
    assert "<|im_start|>" in smollm2.template.source
    assert (smollm2.bos_token_id, smollm2.eos_token_id) == (1, 2)
    assert smollm2.token_text(2) == "<|im_end|>"
    assert smollm2._special_ids == frozenset(range(17))
    assert smollm2.vocab_size == 49152


@pytest.mark.slow
def test_the_gguf_names_the_same_special_tokens_and_the_same_template(smollm2: Tokenizer, smollm2_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    assert smollm2.template is not None
    fields = gguf.GGUFReader(str(smollm2_path)).fields
    assert fields["tokenizer.chat_template"].contents() == smollm2.template.source
    assert fields["tokenizer.ggml.eos_token_id"].contents() == smollm2.eos_token_id
    assert fields["tokenizer.ggml.bos_token_id"].contents() == smollm2.bos_token_id
    assert len(fields["tokenizer.ggml.tokens"].contents()) == smollm2.vocab_size


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

    # Each takes 70 ms or more. Where the GIL was held, one turn was all there was.
    assert num_turns(lambda: smollm2.encode(text, add_special_tokens=False)) > 8
    assert num_turns(lambda: smollm2.decode(ids * 4)) > 8


def test_a_directory_encodes_as_the_gguf_it_was_saved_from(directory: Path, smollm2: Tokenizer) -> None:
    saved = Tokenizer.load(directory)
    text = "<|im_start|>user\n\n1. It's 2024,   né 漢字 😀<|im_end|>"
    assert saved.encode(text, add_special_tokens=True) == smollm2.encode(text, add_special_tokens=True)
    assert saved.template is not None
    assert smollm2.template is not None
    assert saved.template.source == smollm2.template.source
    assert (saved._special_ids, saved.eos_token_id) == (smollm2._special_ids, smollm2.eos_token_id)


@pytest.mark.parametrize("kind", ["gguf", "directory"])
def test_loading_it_imports_no_torch_and_writes_nothing(
    kind: str, smollm2_path: Path, directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.gguf" if kind == "gguf" else tmp_path / "tokenizer"
    path.symlink_to(smollm2_path if kind == "gguf" else directory)
    script = (
        "import sys; from cluster.text.tokenizer import Tokenizer\n"
        "t = Tokenizer.load(sys.argv[1]); t.template.render([{'role': 'user', 'content': 'x'}])\n"
        "sys.exit(int('torch' in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], cwd=Path.cwd(), check=False, timeout=120)
    assert done.returncode == 0
    assert list(tmp_path.iterdir()) == [path]


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"neither a directory nor a \.gguf"):
        Tokenizer.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="No such file"):
        Tokenizer.load(tmp_path / "nothing.gguf")


def test_a_directory_with_a_models_shape_alone_has_no_tokenizer() -> None:
    models = Path(__file__).parent.parent / "benchmarks" / "models"
    with pytest.raises(CheckpointError, match=r"qwen3-8b holds no tokenizer; set `tokenizer`"):
        Tokenizer.load(models / "qwen3-8b")


def test_the_servers_chat_template_takes_the_place_of_the_models(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    template.write_text("{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}")
    tokenizer = Tokenizer.load(directory, chat_template=str(template))
    assert render(PROMPT, tokenizer.template, ModelFormats()) == "[user:x]"
    with pytest.raises(ConfigError, match=r"server\.chat_template"):
        Tokenizer.load(directory, chat_template=str(tmp_path / "absent.jinja"))


def test_a_chat_is_rendered_as_the_template_says(smollm2: Tokenizer) -> None:
    text = render(Conversation(turns=[Turn(role="user", text="hi")]), smollm2.template, ModelFormats())
    assert text.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.encode(text, add_special_tokens=False)
    assert ids[0] == smollm2.bos_token_id
    assert ids[1] != smollm2.bos_token_id
    assert smollm2.decode(ids, skip_special_tokens=False) == text


def test_a_template_that_refuses_or_breaks_is_the_callers_error(directory: Path, tmp_path: Path) -> None:
    template = tmp_path / "mine.jinja"
    for source, match in [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages.__class__.__mro__ }}", "refuses"),
    ]:
        template.write_text(source)
        tokenizer = Tokenizer.load(directory, chat_template=str(template))
        with pytest.raises(RequestError, match=match):
            render(PROMPT, tokenizer.template, ModelFormats())


def test_a_model_without_chat_template_says_so(directory: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(directory, tmp_path / "bare"))
    os.remove(bare / "chat_template.jinja")
    with pytest.raises(RequestError, match="no chat template") as caught:
        render(PROMPT, Tokenizer.load(bare).template, ModelFormats())
    assert caught.value.code == "no_chat_template"


def test_encoding_from_several_threads_gives_the_same_ids(smollm2: Tokenizer) -> None:
    texts = [f"text {i} " * 200 for i in range(16)]
    expected = [smollm2.encode(text, add_special_tokens=False) for text in texts]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda text: smollm2.encode(text, add_special_tokens=False), texts * 4)) == expected * 4
