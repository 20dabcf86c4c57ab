"""Models of transformers whose greedy text is decided: rounding changes no token of it, and different experts do."""

import shutil
from pathlib import Path
from typing import Any

TOKENIZER = Path(__file__).resolve().parents[2] / "examples" / "qwen3-moe-small"
PROMPT = "XQZJ7KW9"
TOKENS = 64
# Distance of each token of the text to the next logit, in standard deviations of the logits. BF16 moves a logit by
# about 0.02 of them, a different function of the experts by about 1.
MARGIN = 0.5


def add_tokenizer(folder: Path) -> Any:
    """Give a model, of at least 128 tokens, the tokenizer of the example; return it."""
    import transformers

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder)
    return transformers.AutoTokenizer.from_pretrained(TOKENIZER)


def decide_text(model: Any, tokenizer: Any) -> str:
    """Set the head of a model so that it continues PROMPT with random letters and digits; return PROMPT and these.

    The head is random but for the least change with which every token of that text leads by MARGIN. The hidden states
    are not changed, and nearly all of each logit stems from the random part.
    """
    import torch

    head = model.get_output_embeddings()
    assert head.weight.data_ptr() != model.get_input_embeddings().weight.data_ptr(), "the embeddings are tied"
    random = torch.Generator().manual_seed(3)
    letters = [number for number in range(3, 128) if tokenizer.decode([number]).isalnum()]
    prompt = tokenizer(PROMPT).input_ids
    text = torch.tensor(letters)[torch.randint(len(letters), (TOKENS,), generator=random)]
    states: list[Any] = []
    hook = head.register_forward_pre_hook(lambda _module, inputs: states.append(inputs[0]))
    with torch.no_grad():
        model(torch.cat([torch.tensor(prompt), text[:-1]])[None], use_cache=False)
    hook.remove()
    inputs = states[-1].double()[0, -TOKENS:]  # [TOKENS, hidden]
    rows = torch.randn(head.weight.shape, generator=random, dtype=torch.float64)
    rows /= (inputs @ rows.T).std()
    logits = inputs @ rows.T
    chosen = logits.gather(1, text[:, None])[:, 0]
    others = logits.scatter(1, text[:, None], -torch.inf).amax(1)
    raised = torch.zeros_like(logits).scatter(1, text[:, None], (others - chosen + MARGIN).clamp(min=0)[:, None])
    head.weight.data.copy_(rows + (torch.linalg.pinv(inputs) @ raised).T)
    leads = (inputs @ head.weight.double().T).topk(2).values
    assert (leads[:, 0] - leads[:, 1]).min() > MARGIN / 2, "the head cannot decide the text"
    return PROMPT + tokenizer.decode(text)


def generate_text(model: Any, tokenizer: Any) -> str:
    """Return PROMPT and the greedy text of transformers after it."""
    import torch

    prompt = torch.tensor([tokenizer(PROMPT).input_ids])
    text = model.generate(prompt, max_new_tokens=TOKENS, do_sample=False)[0, prompt.shape[1] :]
    return PROMPT + tokenizer.decode(text)
