"""MTP (NextN) oracle for the tiny glm5_next (run gen_glm5_next.py first).

transformers has no MTP for this family.  Composed from its modules after vLLM glm5next/nvidia/mtp.py (and the PrismaQuant
port of it): e = embed(token_{t+1}) (zeroed where position==0), h = trunk hidden AFTER the final norm; x = eh_proj([enorm(e) | hnorm(h)]);
one plain-residual decoder block (NO hyper-connections) = indexed MLA with its own indexer + MoE; out = shared_head.norm(x);
logits = trunk lm_head(out).  The post-norm output is what the next chained step consumes as h."""
import common as C, torch, copy
from torch import nn
from transformers import DynamicCache
import transformers.models.glm5_next.modeling_glm5_next as M
from safetensors import safe_open
from safetensors.torch import save_file
a = C.args("glm5_next"); d = a.out
m = M.Glm5NextForConditionalGeneration.from_pretrained(d, dtype=torch.float32, attn_implementation="eager").eval()
t = copy.deepcopy(m.config.text_config); t._attn_implementation = "eager"; t._experts_implementation = "eager"
t.layer_types = ["indexed_attention"]; t.indexer_types = ["full"]; t.mlp_layer_types = ["sparse"]; t.num_hidden_layers = 1
H = t.hidden_size


class Mtp(nn.Module):
    def __init__(s):
        super().__init__()
        n = lambda: M.Glm5NextTextRMSNorm(H, t.rms_norm_eps)
        s.enorm, s.hnorm, s.input_layernorm, s.post_attention_layernorm, s.shared_head_norm = n(), n(), n(), n(), n()
        s.eh_proj = nn.Linear(2 * H, H, bias=False)
        s.self_attn = M.Glm5NextTextAttention(t, 0); s.mlp = M.Glm5NextTextMoE(t)

    def forward(s, h, tok, cache):
        past = cache.get_seq_length(); pos = past + torch.arange(tok.shape[1])
        e = emb(tok).masked_fill((pos == 0)[None, :, None], 0.0)
        x = s.eh_proj(torch.cat([s.enorm(e), s.hnorm(h)], -1))
        y, _, _ = s.self_attn(s.input_layernorm(x), attention_mask=torch.ones(1, tok.shape[1], dtype=torch.bool), cache=cache)
        r = x + y
        out = s.shared_head_norm(r + s.mlp(s.post_attention_layernorm(r)))
        return out, m.lm_head(out)


def special(n, x, g):
    if n.endswith("e_score_correction_bias"): return 0.3 * torch.randn(x.shape, generator=g)
    if n.endswith("index_kpool_compress_ape"): return torch.randn(x.shape, generator=g)
    if n.endswith("k_norm.bias"): return 0.3 * torch.randn(x.shape, generator=g)
emb = m.get_input_embeddings()
mtp = Mtp().eval(); C.randomise(mtp, 81, special)
ids = safe_open(d + "/golden.safetensors", "pt").get_tensor("input_ids")
hid = []
h = m.model.language_model.norm.register_forward_hook(lambda mod, i, o: hid.append(o.clone()))
with torch.no_grad():
    lg = m(input_ids=ids, use_cache=False).logits; h.remove()
    nxt = torch.cat([ids[:, 1:], lg[:, -1:].argmax(-1)], 1)
    cache = DynamicCache(config=t)
    o, ml = mtp(hid[0], nxt, cache)
    out = {"post_norm_hidden": hid[0], "next_ids": nxt, "mtp.prefill.hidden": o, "mtp.prefill.logits": ml}
    prev, dr, ch = o[:, -1:], [ml[:, -1].argmax(-1)], [ml[:, -1]]
    for k in range(3):
        prev, l = mtp(prev, dr[-1][None], cache); ch.append(l[:, -1]); dr.append(l[:, -1].argmax(-1))
    out["mtp.chain.logits"] = torch.stack(ch, 1); out["mtp.drafts"] = torch.stack(dr, 1)
save_file({k: v.contiguous() for k, v in out.items()}, d + "/golden_mtp.safetensors")
w, L = {}, m.config.text_config.num_hidden_layers
for k, v in mtp.state_dict().items():
    n = f"model.language_model.layers.{L}." + k.replace("shared_head_norm", "shared_head.norm")
    if n.endswith("experts.gate_up_proj"):
        for e in range(v.shape[0]):
            g_, u = v[e].chunk(2, 0); w[n.replace("gate_up_proj", f"{e}.gate_proj.weight")] = g_.clone(); w[n.replace("gate_up_proj", f"{e}.up_proj.weight")] = u.clone()
    elif n.endswith("experts.down_proj"):
        for e in range(v.shape[0]): w[n.replace("down_proj", f"{e}.down_proj.weight")] = v[e].clone()
    else: w[n] = v.clone()
save_file({k: v.contiguous() for k, v in w.items()}, d + "/mtp.safetensors")
print("glm mtp drafts", out["mtp.drafts"].tolist()); print([k for k in sorted(w) if "experts" not in k])
