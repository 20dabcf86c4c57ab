"""ktconvert serve."""

from __future__ import annotations

from typing import Any

import click

from ktconvert.pipeline.cli import options

EPILOG = """\b
Examples:
  ktconvert serve /models/Qwen3-30B-A3B --cpu-weights /models/Qwen3-30B-A3B-INT8
  ktconvert serve /models/Qwen3-30B-A3B-FP8                                          its experts as they are stored
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
"""


@click.command("serve", epilog=EPILOG)
@click.argument("model", type=options.PathOrHubId())
@click.option(
    "--cpu-weights",
    type=options.FilePath(),
    default=None,
    help="What MODEL was converted into, or a checkpoint; its experts are computed from it. [default: MODEL]",
)
@options.gpu_experts
@click.option("--host", type=options.Text(), default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=options.Number(1, 65535), default=8000, show_default=True, help="Port to listen on.")
@click.option("--model-name", type=options.Text(), default=None, help="What clients call the model. [default: MODEL]")
@click.option(
    "--api-key-file",
    type=options.FilePath(),
    default=None,
    help="A file with the key that clients have to send. [default: KTCONVERT_API_KEY, else none]",
)
@click.option("--threads", type=options.Number(min=1), default=None, help="Threads. [default: physical cores]")
@click.option("--exact", is_flag=True, help="Round as kt-kernel does, bit for bit.")
@click.option("--trust-remote-code", is_flag=True, help="Let transformers run Python code that comes with MODEL.")
def serve(model: str, **params: Any) -> None:
    """Serve a model behind transformers' OpenAI-compatible server, its experts computed by ktconvert's runtime.

    MODEL is a directory or a hub id (org/name). Without --cpu-weights its experts are computed as they are stored. The
    server answers for this model only; Ctrl-C ends it.
    """
    from ktconvert.pipeline.models import generate
    from ktconvert.pipeline.models.serving import access
    from ktconvert.pipeline.models.serving.server import listen
    from ktconvert.pipeline.ui.progress import Reporter

    options.check_kernels("the command again")
    generate.require("serve", Reporter().warn)
    params["threads"] = options.computing_threads(params["threads"], Reporter())
    file = params["api_key_file"]
    key = access.key_from(file)
    if file is not None and access.is_open(file):
        Reporter().warn(f"{file}: other users of this machine can read the API key: chmod 600 {file}")
    if key is None and not access.is_loopback(params["host"]):
        Reporter().warn(
            f"--host {params['host']} lets other machines ask, and none has to send a key: give --api-key-file"
        )
    settings = ("cpu_weights", "gpu_experts_mask", "num_gpu_experts", "trust_remote_code", "threads", "exact")
    choice = generate.Choice(model, **{name: params[name] for name in settings})
    listen(generate.with_own_experts(choice), params["host"], params["port"], params["model_name"], key)
