// Writes llama.cpp's logits for a list of token ids: the reference of minfer's peer tests.
//
// usage: dump_logits MODEL.gguf THREADS OUT.f32 ID...
//
// OUT.f32 holds [ids, vocabulary] little-endian f32, one row per position, all ids computed in one batch. Standard
// output gets the greedy continuation. With KV32=1 in the environment the KV cache is f32 and attention is the plain
// one, so that what is left of the difference to an f32 engine is rounding; otherwise llama.cpp's defaults (f16 cache,
// flash attention) hold.
#include "llama.h"

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

constexpr int kContext = 512;
constexpr int kGreedy  = 16;

void fill(llama_batch & batch, const std::vector<llama_token> & ids, int first_position) {
    batch.n_tokens = static_cast<int32_t>(ids.size());
    for (size_t i = 0; i < ids.size(); i++) {
        batch.token[i]     = ids[i];
        batch.pos[i]       = first_position + static_cast<int>(i);
        batch.n_seq_id[i]  = 1;
        batch.seq_id[i][0] = 0;
        batch.logits[i]    = 1;
    }
}

int argmax(const float * logits, int n) {
    int best = 0;
    for (int i = 1; i < n; i++) {
        if (logits[i] > logits[best]) best = i;
    }
    return best;
}

int fail(const char * what) {
    std::fprintf(stderr, "dump_logits: %s\n", what);
    return 1;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc < 5) return fail("usage: dump_logits MODEL.gguf THREADS OUT.f32 ID...");
    std::vector<llama_token> ids;
    for (int i = 4; i < argc; i++) ids.push_back(std::atoi(argv[i]));
    if (ids.size() + kGreedy > kContext) return fail("too many ids");

    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(argv[1], llama_model_default_params());
    if (!model) return fail("cannot load the model");

    llama_context_params params = llama_context_default_params();
    params.n_ctx     = params.n_batch = params.n_ubatch = kContext;
    params.n_threads = params.n_threads_batch = std::atoi(argv[2]);
    if (std::getenv("KV32")) {
        params.type_k = params.type_v = GGML_TYPE_F32;
        params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return fail("cannot make a context");

    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    llama_batch batch = llama_batch_init(kContext, 0, 1);
    fill(batch, ids, 0);
    if (llama_decode(context, batch)) return fail("decoding the prompt failed");
    FILE * out = std::fopen(argv[3], "wb");
    if (!out) return fail("cannot open the output file");
    for (size_t i = 0; i < ids.size(); i++) {
        const float * row = llama_get_logits_ith(context, static_cast<int32_t>(i));
        if (std::fwrite(row, sizeof(float), n_vocab, out) != static_cast<size_t>(n_vocab)) return fail("write failed");
    }
    if (std::fclose(out)) return fail("write failed");

    std::printf("n_vocab=%d greedy:", n_vocab);
    int position = static_cast<int>(ids.size());
    int row      = position - 1;
    for (int i = 0; i < kGreedy; i++, row = 0) {
        const int token = argmax(llama_get_logits_ith(context, row), n_vocab);
        std::printf(" %d", token);
        fill(batch, { token }, position++);
        if (llama_decode(context, batch)) return fail("decoding a token failed");
    }
    std::puts("");
    llama_batch_free(batch);
    llama_free(context);
    llama_model_free(model);
    return 0;
}
