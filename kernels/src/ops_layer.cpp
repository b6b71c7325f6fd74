// Decoder layers as one MLX primitive, which writes into the buffers that it is given.
#include <cstring>

#include "bridge.h"
#include "layer.h"
#include "ops.h"

namespace mantou {
namespace {

// Row-major, all of its memory, and no view of it anywhere.
bool writable(const array& a) {
  return a.data_shared_ptr().use_count() == 1 && a.data_shared_ptr()->is_owned() && a.flags().row_contiguous &&
         a.offset() == 0 && a.data_size() == a.size();
}

// Gives a buffer memory of its own. Returns an array with the memory it had, whose contents are still to be copied.
array parted(array buffer) {
  array old(buffer.shape(), buffer.dtype(), nullptr, {});
  old.copy_shared_buffer(buffer);
  mx::Strides strides(buffer.ndim(), 1);
  for (int d = static_cast<int>(buffer.ndim()) - 1; d > 0; --d) strides[d - 1] = strides[d] * buffer.shape(d);
  array::Flags flags{};
  flags.contiguous = flags.row_contiguous = true;
  flags.col_contiguous = false;
  buffer.set_data(mx::allocator::malloc(buffer.nbytes()), buffer.size(), std::move(strides), flags);
  return old;
}

struct LayerNode {
  std::vector<std::shared_ptr<const LayerSpec>> specs;
  int first_slot, window, ring, bits, group, shift;
  bool counted, masked, paged;
  int buffers_each() const { return bits == 0 ? 2 : 6; }
  int num_buffers() const { return buffers_each() * static_cast<int>(specs.size()); }
};

// One layer or several that follow each other.
class DecoderLayers : public CpuPrimitive {
 public:
  DecoderLayers(mx::Stream s, LayerNode node) : CpuPrimitive(s), node_(std::move(node)) {}
  const char* name() const override { return "MantouDecoderLayers"; }

  // Inputs: x, the buffers layer by layer, start, count?, mask?, table?. Result: y.
  // The buffers are written in place: were they results, each would keep all inputs, and a node cost the square of its
  // layers. What a view still sees is left to it: then the buffer moves.
  void eval_cpu(const std::vector<array>& in, std::vector<array>& out) override {
    allocate(out[0]);
    std::vector<std::pair<int, array>> moved;
    for (int i = 1; i <= node_.num_buffers(); ++i)
      if (!writable(in[i])) moved.emplace_back(i, parted(in[i]));
    dispatch(in, out, [node = node_, moved = std::move(moved)](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[6];
      const int n = node.num_buffers();
      for (const auto& [i, old] : moved) std::memcpy(in[i].data<uint8_t>(), contiguous(old, scratch[1]), old.nbytes());
      LayerCall c;
      c.x = contiguous(in[0], scratch[0]);
      c.out = out[0].data<uint8_t>();
      c.type = scalar_of(out[0].dtype());
      c.batch = in[0].shape(0), c.tokens = in[0].shape(1);
      c.start = contiguous_as<int32_t>(in[n + 1], scratch[2]);
      c.count = node.counted ? contiguous_as<int32_t>(in[n + 2], scratch[3]) : nullptr;
      c.window = node.window;
      c.ring = node.ring;
      BlockTable blocks;
      if (node.paged) {
        const array& table = in[n + 2 + node.counted + node.masked];
        blocks = {contiguous_as<int32_t>(table, scratch[5]), table.shape(1), node.shift};
      }
      if (node.masked) {
        const array& mask = in[n + 2 + node.counted];  // [batch, 1, tokens, ring]
        c.mask.data = contiguous(mask, scratch[4]);
        c.mask.element_bytes = 1;
        c.mask.stride[0] = int64_t{mask.shape(2)} * mask.shape(3), c.mask.stride[2] = mask.shape(3);
      }
      for (size_t i = 0; i < node.specs.size(); ++i, c.x = c.out) {
        const LayerSpec& spec = *node.specs[i];
        array* buffers = in.data() + 1 + i * node.buffers_each();
        c.keys = buffer(node, spec, buffers, 0), c.values = buffer(node, spec, buffers, 1);
        c.keys.table = c.values.table = blocks;
        c.next = i + 1 < node.specs.size() ? node.specs[i + 1]->qkv.get() : nullptr;
        run_layer(kernels(), spec, c);
      }
    });
  }

 private:
  // Buffer 0 holds keys, 1 values; scales and biases of keys follow in 2 and 3, of values in 4 and 5.
  static KVBuffer buffer(const LayerNode& node, const LayerSpec& spec, array* buffers, int which) {
    KVBuffer b;
    b.data = buffers[which].data<uint8_t>();
    b.bits = node.bits, b.group = node.group;
    b.type = scalar_of(buffers[node.bits == 0 ? which : 2].dtype());
    b.first_slot = node.first_slot, b.heads = spec.kv_heads, b.dim = spec.head_dim;
    b.capacity = buffers[which].shape(2);
    if (node.bits != 0)
      b.scales = buffers[2 + 2 * which].data<uint8_t>(), b.biases = buffers[3 + 2 * which].data<uint8_t>();
    return b;
  }

  LayerNode node_;
};

// The buffers of one layer, checked against it.
void check_buffers(const LayerSpec& spec, const std::vector<array>& buffers, int batch, const LayerOptions& o, mx::Shape* lead) {
  const int dim = spec.head_dim;
  require(o.bits == 0 || ((o.bits == 4 || o.bits == 8) && (o.group == 32 || o.group == 64 || o.group == 128) && dim % o.group == 0),
          "layer: packed keys have 4 or 8 bits in groups of 32, 64 or 128 that divide the head dimension");
  require(buffers.size() == (o.bits == 0 ? 2u : 6u), "layer: the buffers do not fit");
  const array& keys = buffers[0];
  require(keys.ndim() == 4 && keys.shape(1) == spec.kv_heads && o.first_slot >= 0, "layer: the buffers do not fit");
  require(o.table ? keys.shape(0) == 1 : o.first_slot + batch <= keys.shape(0), "layer: the buffers do not fit");
  const mx::Dtype type = buffers[o.bits == 0 ? 0 : 2].dtype();
  require(is_float(type), "layer: expected floats");
  for (size_t i = 0; i < buffers.size(); ++i) {
    const bool integers = o.bits != 0 && i < 2;
    const int width = integers ? dim * o.bits / 32 : o.bits != 0 ? dim / o.group : dim;
    require(buffers[i].shape() == mx::Shape{keys.shape(0), keys.shape(1), keys.shape(2), width} &&
                buffers[i].dtype() == (integers ? mx::uint32 : type),
            "layer: the buffers do not fit");
  }
  *lead = keys.shape();
}

}  // namespace

std::vector<float> floats_of(const Optional& a) {
  if (!a) return {};
  array f = mx::contiguous(as_floats(*a), false, cpu_stream());
  f.eval();
  return {f.data<float>(), f.data<float>() + f.size()};
}

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

array layers(const array& x, const std::vector<std::shared_ptr<LayerSpec>>& specs,
             const std::vector<std::vector<array>>& buffers, const array& start, const LayerOptions& o) {
  require(!specs.empty() && specs.size() == buffers.size(), "layer: each layer has its buffers");
  require(x.ndim() == 3 && x.size() > 0 && is_float(x.dtype()), "layer: wrong input");
  const int batch = x.shape(0), tokens = x.shape(1);
  std::vector<array> inputs{x};
  const int shift = o.table ? block_shift(*o.table, o.block, batch, "layer") : 0;
  LayerNode node{{},    o.first_slot,        o.window,            o.ring,               o.bits, o.group,
                 shift, o.count.has_value(), o.mask.has_value(), o.table.has_value()};
  for (size_t i = 0; i < specs.size(); ++i) {
    require(specs[i] != nullptr && x.shape(2) == specs[i]->qkv->layout.k, "layer: wrong input");
    mx::Shape keys;
    check_buffers(*specs[i], buffers[i], batch, o, &keys);
    require(o.ring <= keys[2], "layer: a ring needs a mask, and no more columns than there are");
    inputs.insert(inputs.end(), buffers[i].begin(), buffers[i].end());
    node.specs.push_back(specs[i]);
  }
  require(start.ndim() == 1 && start.shape(0) == batch && (!o.count || o.count->shape() == start.shape()) && o.window >= 0,
          "layer: start and count have one value a row");
  require((o.ring > 0) == o.mask.has_value() && o.ring >= 0 && (o.ring == 0 || tokens <= o.ring),
          "layer: a ring needs a mask, and no more columns than there are");
  inputs.push_back(as_type(start, mx::int32));
  if (o.count) inputs.push_back(as_type(*o.count, mx::int32));
  if (o.mask) {
    require(o.mask->dtype() == mx::bool_ && o.mask->shape() == mx::Shape{batch, 1, tokens, o.ring},
            "layer: the mask is bool [B, 1, T, ring]");
    inputs.push_back(*o.mask);
  }
  if (o.table) {
    require(o.ring == 0 && o.first_slot == 0, "layer: paged rows have no ring and share one slot");
    inputs.push_back(as_type(*o.table, mx::int32));
  }
  return array(x.shape(), x.dtype(), std::make_shared<DecoderLayers>(cpu_stream(), std::move(node)), std::move(inputs));
}

}  // namespace mantou
