// The decoder layer as one MLX primitive of three results: hidden state, keys, values.
#include <cstring>

#include "bridge.h"
#include "layer.h"
#include "ops.h"

namespace mantou {
namespace {

// Whether nobody but this node holds the buffer. MLX's own test (`is_donatable`) asks for one holder of the array,
// but each result of a node keeps a copy of the inputs, so a node with three results counts as three.
bool only_ours(const array& a, long num_results) {
  static_assert(sizeof(array) == sizeof(std::shared_ptr<void>));  // exact MLX release: checked at build and import
  const long holders = reinterpret_cast<const std::shared_ptr<void>&>(a).use_count();
  return holders == num_results && a.data_shared_ptr().use_count() == 1 && a.data_shared_ptr()->is_owned() &&
         a.flags().row_contiguous && a.offset() == 0 && a.data_size() == a.size();
}

class DecoderLayer : public CpuPrimitive {
 public:
  DecoderLayer(mx::Stream s, std::shared_ptr<const LayerSpec> spec, int first_slot, int window, bool counted)
      : CpuPrimitive(s), spec_(std::move(spec)), first_slot_(first_slot), window_(window), counted_(counted) {}
  const char* name() const override { return "MantouDecoderLayer"; }

  void eval_cpu(const std::vector<array>& in, std::vector<array>& out) override {
    allocate(out[0]);
    bool reuse[2];
    for (int i = 0; i < 2; ++i) {
      reuse[i] = only_ours(in[1 + i], 3);
      reuse[i] ? out[1 + i].copy_shared_buffer(in[1 + i]) : allocate(out[1 + i]);
    }
    dispatch(in, out, [spec = spec_, first = first_slot_, window = window_, counted = counted_, k = reuse[0], v = reuse[1]](
                          std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[5];
      if (!k) std::memcpy(out[1].data<uint8_t>(), contiguous(in[1], scratch[1]), out[1].nbytes());
      if (!v) std::memcpy(out[2].data<uint8_t>(), contiguous(in[2], scratch[2]), out[2].nbytes());
      LayerCall c;
      c.x = contiguous(in[0], scratch[0]);
      c.out = out[0].data<uint8_t>();
      c.type = scalar_of(out[0].dtype());
      c.batch = in[0].shape(0), c.tokens = in[0].shape(1);
      c.keys = out[1].data<uint8_t>(), c.values = out[2].data<uint8_t>();
      c.kv = scalar_of(out[1].dtype());
      c.first_slot = first, c.capacity = out[1].shape(2);
      c.start = contiguous_as<int32_t>(in[3], scratch[3]);
      c.count = counted ? contiguous_as<int32_t>(in[4], scratch[4]) : nullptr;
      c.window = window;
      run_layer(kernels(), *spec, c);
    });
  }

 private:
  std::shared_ptr<const LayerSpec> spec_;
  int first_slot_, window_;
  bool counted_;
};

std::vector<float> floats_of(const Optional& a) {
  if (!a) return {};
  array f = mx::contiguous(as_floats(*a), false, cpu_stream());
  f.eval();
  return {f.data<float>(), f.data<float>() + f.size()};
}

}  // namespace

std::shared_ptr<LayerSpec> make_layer(const LayerParts& p) {
  auto s = std::make_shared<LayerSpec>();
  s->qkv = p.qkv, s->out = p.out, s->gate_up = p.gate_up, s->down = p.down;
  s->qkv_bias = floats_of(p.qkv_bias), s->out_bias = floats_of(p.out_bias);
  s->input_norm = floats_of(p.input_norm), s->mlp_norm = floats_of(p.mlp_norm);
  s->attention_out_norm = floats_of(p.attention_out_norm), s->mlp_out_norm = floats_of(p.mlp_out_norm);
  s->query_norm = floats_of(p.query_norm), s->key_norm = floats_of(p.key_norm);
  s->eps = p.eps;
  s->heads = p.heads, s->kv_heads = p.kv_heads, s->head_dim = p.head_dim;
  s->scale = p.scale;
  s->rope_dims = p.rope_dims, s->rope_traditional = p.rope_traditional, s->rope_input_scale = p.rope_input_scale;
  require(p.rope_base.has_value() != p.rope_periods.has_value(), "layer: give exactly one of rope_base and rope_periods");
  const std::vector<float> periods = floats_of(p.rope_periods);
  require(periods.empty() || static_cast<int>(periods.size()) == p.rope_dims / 2, "layer: rope_periods must have rope_dims / 2 values");
  s->rope = RopeTable::shared(p.rope_base ? rope_frequencies(*p.rope_base, p.rope_dims / 2)
                                          : RopeTable::from_periods(periods.data(), p.rope_dims / 2),
                              p.rope_scale);
  s->gate = gate_of(p.gate);
  s->planes = p.planes;
  check_layer(*s);
  return s;
}

std::vector<array> layer(const array& x, const std::shared_ptr<LayerSpec>& spec, const array& keys, const array& values,
                         const array& start, const Optional& count, int first_slot, int window) {
  require(spec != nullptr && x.ndim() == 3 && x.shape(2) == spec->qkv->layout.k && x.size() > 0, "layer: wrong input");
  require(is_float(x.dtype()) && is_float(keys.dtype()) && values.dtype() == keys.dtype(), "layer: expected floats");
  const int batch = x.shape(0);
  require(keys.ndim() == 4 && values.shape() == keys.shape() && keys.shape(1) == spec->kv_heads &&
              keys.shape(3) == spec->head_dim && first_slot >= 0 && first_slot + batch <= keys.shape(0),
          "layer: the buffers do not fit");
  require(start.ndim() == 1 && start.shape(0) == batch && (!count || count->shape() == start.shape()) && window >= 0,
          "layer: start and count have one value a row");
  std::vector<array> inputs{x, keys, values, as_type(start, mx::int32)};
  if (count) inputs.push_back(as_type(*count, mx::int32));
  auto node = std::make_shared<DecoderLayer>(cpu_stream(), spec, first_slot, window, count.has_value());
  return array::make_arrays({x.shape(), keys.shape(), keys.shape()}, {x.dtype(), keys.dtype(), keys.dtype()}, node, inputs);
}

}  // namespace mantou
