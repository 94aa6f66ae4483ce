"""What is asked, as options say: out of files, or drawn."""

from bench.prompts import read_prompts
from bench.trace import read_trace
from bench.workload import RequestSpec, parse_lengths, random_specs, text_specs, trace_specs
from common.bench_config import BenchRequestOptions
from common.errors import ConfigError


def read_specs(options: BenchRequestOptions, seed: int) -> list[RequestSpec]:
    """Raises: ConfigError."""
    num = options.num_requests
    if options.trace and options.prompts:
        raise ConfigError("--trace and --prompts: wanted one of them, got both")
    if options.trace:
        return trace_specs(read_trace(options.trace), num, options.max_input_len, options.max_output_len)
    output_len = parse_lengths(options.output_len)
    if options.prompts:
        return text_specs(read_prompts(options.prompts, options.prompt_field), num, output_len, seed)
    return random_specs(num, parse_lengths(options.input_len), output_len, seed)
