"""`ktconvert serve`: an OpenAI-compatible server with converted experts."""

from __future__ import annotations

import re

from ktconvert.layouts.errors import UsageError
from ktconvert.pipeline.cli import preconditions
from ktconvert.pipeline.cli.command import command
from ktconvert.pipeline.options.model_options import ServeOptions

ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#]+")


@command("serve", ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model with transformers' OpenAI-compatible server, with its experts computed by ktconvert's runtime.

    Without --cpu-weights, the runtime computes the experts in MODEL's own format. The server offers only this model and
    its adapters; Ctrl-C ends it.

    Examples:
      ktconvert serve MODEL --cpu-weights OUT
      ktconvert serve MODEL    the original experts
      ktconvert serve MODEL --cpu-weights OUT --adapter sql=ADAPTER
      curl localhost:8000/v1/chat/completions \\
          -H 'Content-Type: application/json' \\
          -d '{"messages": [{"role": "user", "content": "Hello!"}]}'
    """
    from ktconvert.layouts.extras import require_packages
    from ktconvert.pipeline.models import adapter_loading, loading
    from ktconvert.pipeline.models.serving import authentication
    from ktconvert.pipeline.report.progress import Reporter

    if options.model_name is not None and not options.model_name.strip():
        raise UsageError("--model-name is empty; give a name, or leave the option out")
    reporter = Reporter()
    file = options.api_key_file
    choice = preconditions.make_model_choice("serve", options, reporter)
    from ktconvert.pipeline.models.serving.server import listen

    if options.adapters:
        require_packages("--adapter", ["peft"], "train")
    adapters = adapter_loading.adapters_by_name(options.adapters, options.model_name or choice.model)
    key = authentication.read_api_key(file)
    if file is not None and authentication.is_readable_by_others(file):
        reporter.warn(f"{file}: other users of this machine can read the API key; run chmod 600 {file}")
    if key is None and not authentication.is_loopback(options.host):
        reporter.warn(f"--host {options.host} accepts requests from other machines without a key; give --api-key-file")
    if invalid := [origin for origin in options.cors_origins if not ORIGIN.fullmatch(origin)]:
        raise UsageError(f"--cors-origin {invalid[0]}: not an origin; give SCHEME://HOST[:PORT] without a path, or *")
    more = {"name": options.model_name, "key": key, "adapters": adapters}
    listen(loading.with_own_experts(choice, reporter.warn), options.host, options.port, options.cors_origins, **more)
