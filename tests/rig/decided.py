"""Models of transformers whose greedy text is decided: rounding changes no token of it, and different experts do.

Rounding moves a logit by about 0.02 standard deviations of the logits. It could change the text where two tokens are
equally likely, or where a router finds two experts equally good. The text and the head of the model are chosen without
such ties.
"""

import itertools
import shutil
from pathlib import Path
from typing import Any, NamedTuple

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "qwen3-moe-small"
PROMPT, TOKENS = 8, 64  # number of tokens of the prompt and of the text
MARGIN = 0.5  # distance of each token of the text to the next logit, in standard deviations of the logits
ROUNDINGS = 8  # number of draws of other embeddings
# Their relative errors: those of BF16 are below 2**-8. Smaller ones are for models that enlarge errors in many layers.
ROUNDING = (2**-7, 2**-8, 2**-9, 2**-10)
STABLE = 0.15  # bound of the relative change of hidden states; if an expert changes, it is about 1
DRAWS, TRIES = 2, 150  # numbers of texts, and of changes of each


class Text(NamedTuple):
    """A prompt, and the model's greedy text after it."""

    prompt: str
    text: str


def add_tokenizer(folder: Path) -> Any:
    """Give a model, of at least 128 tokens, the tokenizer of the example; return it."""
    import transformers

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER)


def decide_text(model: Any, tokenizer: Any) -> Text:
    """Set the head of a model so that it continues a prompt with a text; both are random letters and digits.

    The head is random but for the least change with which every token of the text leads by MARGIN. The hidden states
    are not changed, and nearly all of each logit stems from the random part.
    """
    import torch

    head = model.get_output_embeddings()
    assert head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr(), "the embeddings are tied"
    for rounding, seed in itertools.product(ROUNDING, range(DRAWS)):
        random = torch.Generator().manual_seed(seed)
        ids = _draw_stable_ids(model, tokenizer, rounding, random)
        if ids is None:
            continue
        prompt, text = ids[:PROMPT], ids[PROMPT:]
        inputs = _compute_head_inputs(model, ids[None, :-1])[0]
        rows = torch.randn(head.weight.shape, generator=random, dtype=torch.float64)
        rows /= (inputs @ rows.T).std()
        logits = inputs @ rows.T
        chosen = logits.gather(1, text[:, None])
        others = logits.scatter(1, text[:, None], -torch.inf).amax(1, keepdim=True)
        raised = torch.zeros_like(logits).scatter(1, text[:, None], (others - chosen + MARGIN).clamp(min=0))
        head.weight.data.copy_(rows + (torch.linalg.pinv(inputs) @ raised).T)
        if torch.equal(generate(model, prompt), text):  # with a cache, which rounds differently
            return Text(tokenizer.decode(prompt), tokenizer.decode(text))
    raise AssertionError("no text of this model is decided")


def _draw_stable_ids(model: Any, tokenizer: Any, rounding: float, random: Any) -> Any:
    """Return ids [PROMPT + TOKENS] whose hidden states change little if the embeddings change by this relative error.

    A token is drawn again until no router sees two experts as equally good. None if that takes too long.
    """
    import torch

    letters = torch.tensor([number for number in range(3, 128) if tokenizer.decode([number]).isalnum()])
    ids = letters[torch.randint(len(letters), (PROMPT + TOKENS,), generator=random)]

    def draw(at: int) -> None:
        """Draw one token again; those of the prompt must not merge with each other."""
        ids[at] = letters[torch.randint(len(letters), (), generator=random)]
        while tokenizer(tokenizer.decode(ids[:PROMPT])).input_ids != ids[:PROMPT].tolist():
            ids[:PROMPT] = letters[torch.randint(len(letters), (PROMPT,), generator=random)]

    def round_embeddings(_module: Any, _inputs: Any, output: Any) -> Any:
        errors = rounding * torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
        errors[0] = 0
        return (output.float() * (1 + errors)).to(output.dtype)

    draw(PROMPT)
    hook = model.get_input_embeddings().register_forward_hook(round_embeddings)
    stable = False
    for _ in range(TRIES):
        states = _compute_head_inputs(model, ids[:-1].expand(1 + ROUNDINGS, -1))
        change = ((states - states[0]).norm(dim=-1) / states[0].norm(dim=-1)).amax(0)
        unstable = (change > STABLE).nonzero()
        if stable := not len(unstable):
            break
        draw(PROMPT - 1 + int(unstable[0]))
    hook.remove()
    return ids if stable else None


def _compute_head_inputs(model: Any, ids: Any) -> Any:
    """Return what enters the head for the last TOKENS of ids [batch, tokens]: float64 [batch, TOKENS, hidden]."""
    import torch

    states: list[Any] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _module, inputs: states.append(inputs[0]))
    with torch.no_grad():
        model(ids, use_cache=False)
    hook.remove()
    return states[-1].double()[:, -TOKENS:]


def generate(model: Any, prompt: Any) -> Any:
    """Return the greedy tokens of transformers after a prompt of ids."""
    generated = model.generate(prompt[None], max_new_tokens=TOKENS, do_sample=False)
    return generated[0, len(prompt) :]


def generate_text(model: Any, tokenizer: Any, prompt: str) -> str:
    """Return the greedy text of transformers after a prompt."""
    import torch

    return str(tokenizer.decode(generate(model, torch.tensor(tokenizer(prompt).input_ids))))
