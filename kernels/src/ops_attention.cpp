// Attention as an MLX primitive. Keys that are about to be unpacked are read packed instead.
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "bridge.h"
#include "ops_kv.h"
#include "ops.h"
#include "pool.h"

namespace mantou {
namespace {

struct AttentionNode {
  float scale;
  bool causal, mask, sinks, start, table;
  int window, bits, group, shift, columns;
};

// Packed rows as bytes, and their scales and biases.
View4 packed_view(const array& rows, const array& scales, const array& biases, const AttentionNode& node, Packed4& groups,
                  Scratch* scratch) {
  View4 v = view_of(rows, scratch[0]);
  v.type = scalar_of(scales.dtype());
  for (int64_t& s : v.stride) s *= v.element_bytes;
  v.element_bytes = 1;
  groups = {node.bits, node.group, view_of(scales, scratch[1]), view_of(biases, scratch[2])};
  return v;
}

class Attention : public CpuPrimitive {
 public:
  Attention(mx::Stream s, AttentionNode node) : CpuPrimitive(s), node_(node) {}
  const char* name() const override { return "MantouAttention"; }

  // The result lies in memory as [B, T, H, D]: the caller's transpose and reshape to [B, T, H * D] are then free.
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    array& out = outputs[0];
    const int64_t heads = out.shape(1), tokens = out.shape(2), dim = out.shape(3);
    const array::Flags flags{true, tokens == 1 || heads == 1, false};
    out.set_data(mx::allocator::malloc(out.nbytes()), out.size(), {tokens * heads * dim, dim, heads * dim, 1}, flags);
    dispatch(inputs, outputs, [node = node_](std::vector<array>& in, std::vector<array>& out) { run(node, in, out); });
  }

 private:
  static void run(const AttentionNode& node, std::vector<array>& in, std::vector<array>& out) {
    static thread_local Scratch scratch[13];
    AttentionCall c;
    const array &q = in[0], &k = in[1], &v = in[2];
    c.batch = q.shape(0), c.heads = q.shape(1), c.tokens = q.shape(2), c.head_dim = q.shape(3);
    c.kv_heads = k.shape(1), c.keys = k.shape(2), c.value_dim = out[0].shape(3);
    c.scale = node.scale;
    c.q = view_of(q, scratch[0]);
    if (node.bits == 0) {
      c.k = view_of(k, scratch[1]), c.v = view_of(v, scratch[2]);
    } else {
      const array* groups = &in[in.size() - 4];
      c.k = packed_view(k, groups[0], groups[1], node, c.k_groups, scratch + 6);
      c.v = packed_view(v, groups[2], groups[3], node, c.v_groups, scratch + 9);
    }
    c.causal = node.causal;
    c.window = node.window;
    size_t next = 3;
    if (node.mask) {
      c.has_mask = true;
      c.mask_is_bool = in[next].dtype() == mx::bool_;
      c.mask = view_of(in[next++], scratch[3]);
    }
    if (node.sinks) c.sinks = contiguous_as<float>(in[next++], scratch[4]);
    if (node.start) c.start = contiguous_as<int32_t>(in[next++], scratch[5]);
    if (node.table) read_blocks(node, in[next++], scratch[12], k.shape(2), c);
    c.out = out[0].data<uint8_t>();
    c.out_type = c.round = scalar_of(out[0].dtype());
    attention(kernels(), c);
  }

  static void read_blocks(const AttentionNode& node, const array& table, Scratch& scratch, int pool, AttentionCall& c) {
    c.table = {contiguous_as<int32_t>(table, scratch), table.shape(1), node.shift};
    c.keys = node.columns;
    c.k.stride[0] = c.v.stride[0] = 0;
    for (Packed4* groups : {&c.k_groups, &c.v_groups}) groups->scales.stride[0] = groups->biases.stride[0] = 0;
    for (int b = 0; b < c.batch; ++b)
      if (!c.table.fits(b, c.keys, pool))
        throw std::out_of_range("[mantou_kernels] attention: row " + std::to_string(b) + " has a block outside the pool");
  }

  AttentionNode node_;
};

}  // namespace

array attention(const array& q0, const array& k0, const array& v0, float scale, const AttentionOptions& o) {
  const Unpack *keys = unpacking(k0), *values = unpacking(v0);
  if (o.bits == 0 && keys != nullptr && values != nullptr && keys->same_packing(*values) &&
      mx::promote_types(q0.dtype(), k0.dtype()) == k0.dtype() && k0.dtype() == v0.dtype()) {
    AttentionOptions packed = o;
    packed.bits = keys->bits(), packed.group = keys->group();
    packed.groups = {k0.inputs()[1], k0.inputs()[2], v0.inputs()[1], v0.inputs()[2]};
    return attention(q0, k0.inputs()[0], v0.inputs()[0], scale, packed);
  }
  require(q0.ndim() == 4 && k0.ndim() == 4 && v0.ndim() == 4, "attention: q, k and v have four axes");
  require(o.bits == 0 ? o.groups.empty() : o.groups.size() == 4, "attention: packed keys have scales and biases, as have values");
  const mx::Dtype type = o.bits == 0 ? mx::promote_types(q0.dtype(), mx::promote_types(k0.dtype(), v0.dtype()))
                                     : mx::promote_types(q0.dtype(), o.groups[0].dtype());
  require(is_float(type), "attention: expected floats");
  const array q = as_type(q0, type), k = o.bits == 0 ? as_type(k0, type) : k0, v = o.bits == 0 ? as_type(v0, type) : v0;
  int key_dim = k.shape(3), value_dim = v.shape(3);
  if (o.bits != 0) {
    require((o.bits == 4 || o.bits == 8) && (o.group == 32 || o.group == 64 || o.group == 128) && k.dtype() == mx::uint32 &&
                v.dtype() == mx::uint32,
            "attention: packed keys are uint32 with 4 or 8 bits in groups of 32, 64 or 128");
    key_dim = key_dim * 32 / o.bits, value_dim = value_dim * 32 / o.bits;
    for (int i = 0; i < 4; ++i) {
      const array& rows = i < 2 ? k : v;
      mx::Shape shape = rows.shape();
      shape[3] = (i < 2 ? key_dim : value_dim) / o.group;
      require(o.groups[i].shape() == shape && o.groups[i].dtype() == o.groups[0].dtype() &&
                  shape[3] * o.group == (i < 2 ? key_dim : value_dim),
              "attention: scales or biases do not fit the packed keys");
    }
  }
  const int shift = o.table ? block_shift(*o.table, o.block, q.shape(0), "attention") : 0;
  const int keys_batch = o.table ? 1 : q.shape(0), num_keys = o.table ? o.columns : k.shape(2);
  require(!o.table || (o.columns > 0 && o.columns <= o.table->shape(1) << shift), "attention: the table is too short");
  require(k.shape(0) == keys_batch && v.shape(0) == keys_batch && v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2) &&
              key_dim == q.shape(3) && k.shape(1) >= 1 && q.shape(1) % k.shape(1) == 0,
          "attention: shapes of q, k and v do not match");
  require(q.size() > 0 && k.size() > 0 && v.size() > 0, "attention: empty input");
  require(q.shape(3) <= 4096 && value_dim <= 4096, "attention: the head dimension is over 4096");
  require(o.window >= 0, "attention: the window is negative");
  AttentionNode node{scale,    o.causal, o.mask.has_value(), o.sinks.has_value(), o.start.has_value(), o.table.has_value(),
                     o.window, o.bits,   o.group,            shift,               o.columns};
  if (type != mx::float32) node.scale = as_floats(mx::astype(array(scale), type, cpu_stream())).item<float>();
  std::vector<array> inputs{q, k, v};
  if (o.mask) {
    require(o.mask->ndim() <= 4, "attention: a mask has at most four axes");
    require(o.mask->dtype() == mx::bool_ || mx::promote_types(o.mask->dtype(), type) == type,
            "attention: an additive mask must promote to the type of q, k and v");
    const array m = o.mask->dtype() == mx::bool_ ? *o.mask : as_type(*o.mask, type);
    inputs.push_back(mx::broadcast_to(m, {q.shape(0), q.shape(1), q.shape(2), num_keys}, cpu_stream()));
  }
  if (o.sinks) {
    require(o.sinks->ndim() == 1 && o.sinks->shape(0) == q.shape(1), "attention: sinks have one value a head");
    inputs.push_back(as_floats(*o.sinks));
  }
  if (o.start) {
    require(o.start->ndim() == 1 && o.start->shape(0) == q.shape(0), "attention: start has one value a row");
    inputs.push_back(as_type(*o.start, mx::int32));
  }
  if (o.table) inputs.push_back(as_type(*o.table, mx::int32));
  inputs.insert(inputs.end(), o.groups.begin(), o.groups.end());
  mx::Shape shape{q.shape(0), q.shape(1), q.shape(2), value_dim};
  return array(shape, type, std::make_shared<Attention>(cpu_stream(), node), std::move(inputs));
}

}  // namespace mantou
