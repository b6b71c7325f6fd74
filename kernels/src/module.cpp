// The Python module: names and defaults only.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "amx.h"
#include "bridge.h"
#include "ops.h"
#include "pool.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace mantou;

namespace {

void bind_packing(nb::module_& m) {
  nb::class_<Packed>(m, "Packed")
      .def_prop_ro("nbytes", &Packed::nbytes)
      .def_prop_ro("experts", [](const Packed& p) { return p.layout.experts; })
      .def_prop_ro("rows", [](const Packed& p) { return p.layout.rows; })
      .def_prop_ro("k", [](const Packed& p) { return p.layout.k; })
      .def_prop_ro("bits", [](const Packed& p) { return p.layout.bits; });
  m.def(
      "pack_affine",
      [](std::vector<array> w, std::vector<array> s, std::vector<array> b, int group_size, int bits, bool interleave) {
        return pack_affine({std::move(w), std::move(s), std::move(b)}, group_size, bits, interleave);
      },
      "weights"_a, "scales"_a, "biases"_a, nb::kw_only(), "group_size"_a, "bits"_a, "interleave"_a = false);
  m.def("pack_dense", &pack_dense, "weights"_a, nb::kw_only(), "interleave"_a = false);
}

void bind_linear(nb::module_& m) {
  m.def(
      "linear",
      [](const array& x, const Weights& w, Optional norm, float eps, Optional bias, Optional residual, std::string gate,
         int planes, std::optional<mx::Dtype> dtype) {
        return linear(x, w, {norm, eps, bias, residual, gate, planes, dtype});
      },
      "x"_a, "weights"_a, nb::kw_only(), "norm"_a = nb::none(), "eps"_a = 1e-5f, "bias"_a = nb::none(),
      "residual"_a = nb::none(), "gate"_a = "", "planes"_a = 2, "dtype"_a = nb::none());
  m.def("gather_linear", &gather_linear, "x"_a, "weights"_a, "source"_a, "expert"_a, nb::kw_only(),
        "bias"_a = nb::none(), "planes"_a = 2);
  m.def("embed", &embed, "ids"_a, "weights"_a, "dtype"_a);
  m.def(
      "linear_top",
      [](const array& x, const Weights& w, int count, Optional norm, float eps, int planes) {
        LinearOptions o;
        o.norm = norm, o.norm_eps = eps, o.planes = planes;
        return linear_top(x, w, count, o);
      },
      "x"_a, "weights"_a, "count"_a, nb::kw_only(), "norm"_a = nb::none(), "eps"_a = 1e-5f, "planes"_a = 2);
  m.def("highest_of_product", &highest_of_product, "logits"_a, "allowed"_a = nb::none());
  m.def("adapter_rows", &adapter_rows, "base"_a, "x"_a, "a"_a, "b"_a, "scale"_a, "slot"_a);
}

void bind_rows(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a);
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a);
  m.def("gate", &gate, "kind"_a, "gate"_a, "up"_a = nb::none());
  m.def("rope", &rope, "x"_a, "dims"_a, nb::kw_only(), "traditional"_a, "base"_a.none(), "scale"_a, "offset"_a,
        "freqs"_a = nb::none());
}

void bind_attention(nb::module_& m) {
  m.def(
      "attention",
      [](const array& q, const array& k, const array& v, float scale, bool causal, Optional mask, Optional sinks,
         Optional start, int window, std::vector<array> groups, int bits, int group, Optional table, int block,
         int columns) {
        return attention(q, k, v, scale,
                         {causal, mask, sinks, start, window, std::move(groups), bits, group, table, block, columns});
      },
      "q"_a, "k"_a, "v"_a, nb::kw_only(), "scale"_a, "causal"_a = false, "mask"_a = nb::none(), "sinks"_a = nb::none(),
      "start"_a = nb::none(), "window"_a = 0, "groups"_a = std::vector<array>{}, "bits"_a = 0, "group"_a = 0,
      "table"_a = nb::none(), "block"_a = 0, "columns"_a = 0);
  m.def(
      "kv_write",
      [](array buffer, const array& rows, const array& position, Optional count, int first_slot, int ring, Optional table,
         int block) { return kv_write(buffer, rows, position, count, {first_slot, ring, table, block}); },
      "buffer"_a, "rows"_a, "position"_a, "count"_a = nb::none(), nb::kw_only(), "first_slot"_a = 0, "ring"_a = 0,
      "table"_a = nb::none(), "block"_a = 0);
  m.def("pack_rows", &pack_rows, "x"_a, nb::kw_only(), "bits"_a, "group"_a);
  m.def("unpack_rows", &unpack_rows, "words"_a, "scales"_a, "biases"_a, nb::kw_only(), "bits"_a, "group"_a);
}

void bind_scans(nb::module_& m) {
  m.def("gated_delta", &gated_delta, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a, "mask"_a = nb::none());
  m.def("ssm", &ssm, "x"_a, "a_log"_a, "b"_a, "c"_a, "d"_a, "dt"_a, "state"_a, "mask"_a = nb::none());
}

void bind_draw(nb::module_& m) {
  // Whether its bits are those of MLX's own exp and log: not on AArch64, where MLX may be compiled with fused products.
#if defined(__x86_64__)
  m.attr("draws_like_mlx") = true;
#else
  m.attr("draws_like_mlx") = false;
#endif
  m.def(
      "draw",
      [](const array& logits, array sampled, array inverse_temperature, array top_p, array top_k, array min_p_log,
         array seed_words, array positions, int num_top, Optional allowed, Optional count) {
        return draw(logits, {sampled, inverse_temperature, top_p, top_k, min_p_log, seed_words, positions, num_top,
                             allowed, count});
      },
      "logits"_a, nb::kw_only(), "sampled"_a, "inverse_temperature"_a, "top_p"_a, "top_k"_a, "min_p_log"_a,
      "seed_words"_a, "positions"_a, "num_top"_a = -1, "allowed"_a = nb::none(), "count"_a = nb::none());
}

void bind_layer(nb::module_& m) {
  nb::class_<LayerSpec>(m, "Layer");
  m.def(
      "make_layer",
      [](Weights qkv, Weights out, Weights gate_up, Weights down, array input_norm, array mlp_norm, float eps, int heads,
         int kv_heads, int head_dim, float scale, int rope_dims, bool rope_traditional, std::optional<float> rope_base,
         Optional rope_periods, float rope_scale, float rope_input_scale, std::string gate, Optional qkv_bias,
         Optional out_bias, Optional attention_out_norm, Optional mlp_out_norm, Optional query_norm, Optional key_norm,
         int planes) {
        return make_layer({qkv, out, gate_up, down, qkv_bias, out_bias, input_norm, mlp_norm, attention_out_norm,
                           mlp_out_norm, query_norm, key_norm, eps, heads, kv_heads, head_dim, scale, rope_dims,
                           rope_traditional, rope_base, rope_periods, rope_scale, rope_input_scale, gate, planes});
      },
      nb::kw_only(), "qkv"_a, "out"_a, "gate_up"_a, "down"_a, "input_norm"_a, "mlp_norm"_a, "eps"_a, "heads"_a,
      "kv_heads"_a, "head_dim"_a, "scale"_a, "rope_dims"_a, "rope_traditional"_a, "rope_base"_a.none(),
      "rope_periods"_a.none(), "rope_scale"_a, "rope_input_scale"_a, "gate"_a, "qkv_bias"_a = nb::none(),
      "out_bias"_a = nb::none(), "attention_out_norm"_a = nb::none(), "mlp_out_norm"_a = nb::none(),
      "query_norm"_a = nb::none(), "key_norm"_a = nb::none(), "planes"_a = 2);
  m.def(
      "layers",
      [](const array& x, const std::vector<std::shared_ptr<LayerSpec>>& layers, const std::vector<std::vector<array>>& buffers,
         const array& start, Optional count, Optional mask, int first_slot, int window, int ring, int bits, int group,
         Optional table, int block) {
        return mantou::layers(x, layers, buffers, start,
                              {count, mask, first_slot, window, ring, bits, group, table, block});
      },
      "x"_a, "layers"_a, "buffers"_a, "start"_a, nb::kw_only(), "count"_a = nb::none(), "mask"_a = nb::none(),
      "first_slot"_a = 0, "window"_a = 0, "ring"_a = 0, "bits"_a = 0, "group"_a = 0, "table"_a = nb::none(),
      "block"_a = 0);
}

void bind_encoder(nb::module_& m) {
  nb::class_<EncoderSpec>(m, "EncoderLayer");
  m.def(
      "make_encoder_layer",
      [](Weights qkv, Weights out, Weights up, Weights down, array attention_norm, array norm, float eps, int heads,
         float scale, std::string activation, Optional qkv_bias, Optional out_bias, Optional up_bias, Optional down_bias,
         Optional attention_norm_bias, Optional norm_bias) {
        return make_encoder_layer({qkv, out, up, down, qkv_bias, out_bias, up_bias, down_bias, attention_norm,
                                   attention_norm_bias, norm, norm_bias, eps, heads, scale, activation});
      },
      nb::kw_only(), "qkv"_a, "out"_a, "up"_a, "down"_a, "attention_norm"_a, "norm"_a, "eps"_a, "heads"_a, "scale"_a,
      "activation"_a, "qkv_bias"_a = nb::none(), "out_bias"_a = nb::none(), "up_bias"_a = nb::none(),
      "down_bias"_a = nb::none(), "attention_norm_bias"_a = nb::none(), "norm_bias"_a = nb::none());
  m.def("encoder", &encoder, "x"_a, "layers"_a, "lengths"_a = nb::none());
}

}  // namespace

NB_MODULE(_ext, m) {
  nb::module_::import_("mlx.core");  // its types must be registered before ours mention them
  bind_packing(m);
  bind_linear(m);
  bind_rows(m);
  bind_attention(m);
  bind_scans(m);
  bind_draw(m);
  bind_layer(m);
  bind_encoder(m);
  m.def("select_kernels", [](const std::string& name) { return std::string(select_kernels(name)); }, "name"_a = "");
  m.def("runnable_kernels", [] {
    const auto names = runnable_kernels();
    return std::vector<std::string>(names.begin(), names.end());
  });
  m.def("amx", &amx_state);
  m.def("supported", [] { return kernels_for_cpu() != nullptr; });
  m.def("usable_cpus", &usable_cpus);
  m.def("threads", [] { return Pool::instance().threads(); });
  m.def("set_threads", [](int n) { Pool::instance().resize(n); }, "n"_a);
}
