#!/usr/bin/env bash
# From a clone to a streamed answer that tells where its time went: fetches a small model, builds the server, asks it
# one question, and shows the answer, its metrics event and its JSONL line. Everything lands under the Cargo target
# directory; nothing is left running.
#
#   ./quickstart.sh ["your question"]
set -euo pipefail
cd "$(dirname "$0")"

question=${1:-"Why is the sky blue? Answer in two sentences."}
target=${CARGO_TARGET_DIR:-target}
run=$target/quickstart
server_pid=

main() {
    check_tools
    title "Model"
    local model url body
    model=$(tests/setup/model.sh)
    echo "$model"

    title "Build"
    cargo build --release --package uring-serve --bin uring-serve
    echo "$target/release/uring-serve"

    title "Server"
    rm -rf "$run"
    mkdir -p "$run"
    start_server "$model"
    url=$(wait_for_url)
    echo "listening on $url (process $server_pid, log in $run/server.log)"

    title "Question"
    echo "$question"
    body=$(python3 -c "$REQUEST_PY" "$question")
    title "Answer"
    curl --silent --show-error --no-buffer --max-time 300 "$url/v1/chat/completions" \
        --header 'Content-Type: application/json' \
        --header 'X-TRTLLM-return-metrics: 1' \
        --data "$body" | python3 -u -c "$STREAM_PY"

    # The end of the server flushes the file.
    stop_server
    title "Its line in $(echo "$run"/metrics/*.jsonl)"
    python3 -c "$LINE_PY" "$run"/metrics/*.jsonl
}

check_tools() {
    local missing=()
    command -v cargo >/dev/null || missing+=("cargo: install Rust with rustup, or the packages rustc and cargo")
    command -v cc >/dev/null || missing+=("cc: apt-get install gcc libc6-dev")
    command -v curl >/dev/null || missing+=("curl: apt-get install curl")
    command -v python3 >/dev/null || missing+=("python3: apt-get install python3")
    python3 -m pip --version >/dev/null 2>&1 || missing+=("pip: apt-get install python3-pip")
    [ ${#missing[@]} -eq 0 ] && return
    echo "error: not everything that is needed is here" >&2
    echo >&2
    printf 'hint: %s\n' "${missing[@]}" >&2
    exit 1
}

title() {
    if [ -t 1 ]; then printf '\n\033[1m── %s\033[0m\n' "$1"; else printf '\n── %s\n' "$1"; fi
}

start_server() {
    "$target/release/uring-serve" serve "$1" --port 0 --return-perf-metrics \
        --perf-metrics-output-dir "$run/metrics" 2>"$run/server.log" &
    server_pid=$!
    trap stop_server EXIT
    trap 'exit 130' INT TERM
}

# Prints the URL that the server says it listens on; gives up after a minute or when the server has ended.
wait_for_url() {
    local tries url
    for ((tries = 0; tries < 600; tries++)); do
        url=$(sed -n 's/.*listening on \(http:\/\/[^ ]*\).*/\1/p' "$run/server.log" | head -n 1)
        if [ -n "$url" ]; then
            echo "$url"
            return
        fi
        kill -0 "$server_pid" 2>/dev/null || break
        sleep 0.1
    done
    cat "$run/server.log" >&2
    exit 1
}

stop_server() {
    [ -n "$server_pid" ] || return 0
    kill "$server_pid" 2>/dev/null || true
    wait "$server_pid" 2>/dev/null || true
    server_pid=
}

# The question as a request body.
REQUEST_PY=$(cat <<'END'
import json, sys

print(json.dumps({
    "model": "quickstart",
    "messages": [{"role": "user", "content": sys.argv[1]}],
    "max_tokens": 96,
    "temperature": 0,
    "stream": True,
    "stream_options": {"include_usage": True},
}))
END
)

# The stream from stdin: the text as it comes, then the metrics event as a timeline.
STREAM_PY=$(cat <<'END'
import json, shutil, sys


def main():
    event, raw, metrics, usage = "", [], None, {}
    for line in sys.stdin:
        line = line.rstrip("\r\n")
        raw.append(line)
        if line.startswith("event: "):
            event = line[7:]
        elif line.startswith("data: ") and line != "data: [DONE]":
            data = json.loads(line[6:])
            if event == "trtllm.perf_metrics":
                metrics = data
            elif "error" in data:
                sys.exit("the stream failed: " + data["error"]["message"])
            else:
                usage = data.get("usage") or usage
                for choice in data["choices"]:
                    sys.stdout.write(choice["delta"].get("content") or "")
        elif not line:
            event = ""
    print()
    if metrics is None:
        sys.exit("the answer has no metrics event:\n" + "\n".join(raw[-8:]))
    heading("Where its time went (event trtllm.perf_metrics, after [DONE])")
    show(metrics, usage)


def show(metrics, usage):
    spans = items(metrics, "Server-Timing")
    queue, ttft, e2e = (spans["server_" + name] for name in ("queue", "ttft", "e2e"))
    parts = [("queue", 0.0, queue), ("prefill", queue, ttft), ("decode", ttft, e2e)]
    width = max(20, min(60, shutil.get_terminal_size().columns - 30))
    for name, begin, end in parts:
        left = round(begin / e2e * width) if e2e else 0
        length = max(1, round((end - begin) / e2e * width)) if e2e else 1
        left = min(left, width - length)
        print(f"  {name:<8}{end - begin:>11.3f} ms  {' ' * left}{'█' * length}{' ' * (width - left - length)}▏")
    print(f"  {'in all':<8}{e2e:>11.3f} ms")
    tokens = usage.get("completion_tokens")
    if tokens:
        prompt = usage["prompt_tokens"]
        print(f"\n  first token after {ttft:.3f} ms; {prompt} prompt tokens, {tokens} output tokens", end="")
        if tokens > 1 and e2e > ttft:
            gap = (e2e - ttft) / (tokens - 1)
            print(f", {gap:.3f} ms apart ({1000 / gap:.0f} tokens/s)", end="")
        print()
    rows = [("prompt chunks", items(metrics, "X-TRTLLM-Ctx-Chunk-Metrics")),
            ("decode steps", items(metrics, "X-TRTLLM-Step-Metrics"))]
    print(f"\n  {'engine steps':<16}{'what':<9}{'count':>6}{'mean':>10}{'min':>10}{'max':>10}  ms")
    for name, steps in rows:
        for what in ("forward", "sample", "gpu-forward", "gpu-sample"):
            suffix = "-" + what
            times = [ms for step, ms in steps.items()
                     if step.endswith(suffix) and (what.startswith("gpu") or not step.endswith("-gpu" + suffix))]
            if times:
                mean = sum(times) / len(times)
                print(f"  {name:<16}{what:<9}{len(times):>6}{mean:>10.3f}{min(times):>10.3f}{max(times):>10.3f}")
    cut = metrics.get("X-TRTLLM-Metrics-Truncated")
    if cut:
        print(f"  left out by the byte budget: {cut}")


def items(metrics, name):
    """`a;dur=1.5, b;dur=2` as {"a": 1.5, "b": 2.0}, in order."""
    pairs = (item.split(";dur=") for item in metrics.get(name, "").split(", ") if item)
    return {token: float(ms) for token, ms in pairs}


def heading(text):
    print(f"\n\033[1m── {text}\033[0m" if sys.stdout.isatty() else f"\n── {text}")


main()
END
)

# The last line of a JSONL file, indented; long lists of steps are shortened.
LINE_PY=$(cat <<'END'
import json, sys

with open(sys.argv[1]) as lines:
    line = json.loads(lines.readlines()[-1])
shown = 2
for name, steps in line.get("time_breakdown_metrics", {}).items():
    if isinstance(steps, list) and len(steps) > shown + 1:
        steps[shown:] = [f"… {len(steps) - shown} more"]
print(json.dumps(line, indent=2, ensure_ascii=False))
END
)

main
