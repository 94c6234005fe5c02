#!/usr/bin/env bash
# Makes tests/data/reference again: outputs of Hugging Face transformers (5.17, torch 2.11, fp32 on a CPU) for tiny-kimi at several lengths
# and for one small checkpoint a family switch. Needs torch, transformers and safetensors; the tests need only what it wrote.
#   make.sh                all of it
#   [DEVICE=cuda] make.sh mid FOLDER     a checkpoint with the real head sizes (200 MB, not committed) and its reference, for cuda_reference_test
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd); root=$(cd "$here/../.." && pwd); data=$root/tests/data/reference
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
python=${PYTHON:-python3}
if [ "${1:-}" = mid ]; then
  "$python" "$here/make_checkpoint.py" "$2" --preset mid --seed 7
  "$python" -c 'import json,random; r=random.Random(1); print(json.dumps([[r.randrange(1000) for _ in range(n)] for n in (1, 5, 77, 600)]))' > "$work/ids.json"
  "$python" "$here/hf_reference.py" "$2" --ids "$work/ids.json" --out "$work/ref.safetensors" --device "${DEVICE:-cpu}"
  exec "$python" "$here/thin.py" "$work/ref.safetensors" "$2/reference.safetensors" 600
fi
# tiny-kimi: real text (the prompts of tests/data/tiny-kimi) cut to each length
"$python" - "$root/tests/data/tiny-kimi/greedy.jsonl" > "$work/tiny.json" <<'PY'
import json, sys
text = [i for line in open(sys.argv[1]) for l in [json.loads(line)] for i in l["prompt_ids"] + l["continuation_ids"]]
print(json.dumps([text[k * 100:k * 100 + n] for k, n in enumerate([1, 2, 7, 63, 64, 65, 200, 1000, 4096])]))
PY
"$python" "$here/hf_reference.py" "$root/models/tiny-kimi" --ids "$work/tiny.json" --out "$work/ref.safetensors"
"$python" "$here/thin.py" "$work/ref.safetensors" "$data/tiny-kimi.safetensors"
small="--base-vocab 300 --hidden-size 64 --num-hidden-layers 3 --num-attention-heads 4 --n-routed-experts 8 --moe-intermediate-size 64 --original 16 --shards 2"
variant() {
  local name=$1; shift
  # shellcheck disable=SC2086
  "$python" "$here/make_checkpoint.py" "$data/$name" --preset tiny --seed 7 $small "$@"
  "$python" -c 'import json,random; r=random.Random(1); print(json.dumps([[r.randrange(300) for _ in range(n)] for n in (1, 5, 77)]))' > "$work/ids.json"
  "$python" "$here/hf_reference.py" "$data/$name" --ids "$work/ids.json" --out "$work/ref.safetensors"
  "$python" "$here/thin.py" "$work/ref.safetensors" "$data/$name/reference.safetensors"
}
variant plain
variant no-q-lora --no-q-lora
variant bf16-experts --experts bf16
variant flat --flat
variant no-yarn --no-yarn
variant dense-first --first-k-dense-replace 2
variant shared-experts --n-shared-experts 2
variant groups --n-group 4 --topk-group 2
