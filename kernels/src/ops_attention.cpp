// Attention and key-value writes as MLX primitives.
#include <algorithm>
#include <cstring>

#include "attention.h"
#include "bridge.h"
#include "ops.h"
#include "pool.h"

namespace mantou {
namespace {

// A view of an evaluated array of four axes; copies only when the last axis is not contiguous.
View4 view_of(const array& a, Scratch& scratch) {
  View4 v;
  v.type = is_float(a.dtype()) ? scalar_of(a.dtype()) : Scalar::f32;
  v.element_bytes = static_cast<int>(a.itemsize());
  if (a.strides(3) == 1 || a.shape(3) == 1) {
    v.data = a.data<uint8_t>();
    for (int i = 0; i < 3; ++i) v.stride[i] = a.strides(i);
    return v;
  }
  v.data = contiguous(a, scratch);
  v.stride[2] = a.shape(3);
  v.stride[1] = v.stride[2] * a.shape(2);
  v.stride[0] = v.stride[1] * a.shape(1);
  return v;
}

struct AttentionNode {
  float scale;
  bool causal, mask, sinks, start;
  int window, bits, group;
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
    static thread_local Scratch scratch[12];
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
    c.out = out[0].data<uint8_t>();
    c.out_type = c.round = scalar_of(out[0].dtype());
    attention(kernels(), c);
  }

  AttentionNode node_;
};

class KVWrite : public CpuPrimitive {
 public:
  KVWrite(mx::Stream s, bool counted) : CpuPrimitive(s), counted_(counted) {}
  const char* name() const override { return "MantouKVWrite"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    const array& buffer = inputs[0];
    array& out = outputs[0];
    const bool reuse = buffer.flags().row_contiguous && buffer.is_donatable();
    if (reuse) {
      out.copy_shared_buffer(buffer);
    } else {
      allocate(out);
    }
    dispatch(inputs, outputs, [reuse, counted = counted_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[4];
      if (!reuse) std::memcpy(out[0].data<uint8_t>(), contiguous(in[0], scratch[0]), out[0].nbytes());
      write(in[1], contiguous_as<int32_t>(in[2], scratch[2]), counted ? contiguous_as<int32_t>(in[3], scratch[3]) : nullptr,
            out[0]);
    });
  }

 private:
  static void write(const array& rows, const int32_t* position, const int32_t* count, array& out) {
    const int batch = out.shape(0), heads = out.shape(1), capacity = out.shape(2), tokens = rows.shape(2);
    const size_t item = out.itemsize(), dim = out.shape(3);
    for (int b = 0; b < batch; ++b) {
      const int n = count != nullptr ? count[b] : tokens;
      if (n < 0 || n > tokens || position[b] < 0 || static_cast<int64_t>(position[b]) + n > capacity)
        throw std::out_of_range("[mantou_kernels] kv_write: row " + std::to_string(b) + " would write columns " +
                                std::to_string(position[b]) + ".." + std::to_string(position[b] + n) + " of " +
                                std::to_string(capacity));
    }
    static thread_local Scratch scratch;
    const View4 from = view_of(rows, scratch);
    for (int b = 0; b < batch; ++b)
      for (int h = 0; h < heads; ++h) {
        const int n = count != nullptr ? count[b] : tokens;
        uint8_t* to = out.data<uint8_t>() + ((static_cast<size_t>(b) * heads + h) * capacity + position[b]) * dim * item;
        for (int t = 0; t < n; ++t) std::memcpy(to + t * dim * item, from.at(b, h, t), dim * item);
      }
  }

  bool counted_;
};

}  // namespace

array attention(const array& q0, const array& k0, const array& v0, float scale, const AttentionOptions& o) {
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
  require(k.shape(0) == q.shape(0) && v.shape(0) == q.shape(0) && v.shape(1) == k.shape(1) && v.shape(2) == k.shape(2) &&
              key_dim == q.shape(3) && k.shape(1) >= 1 && q.shape(1) % k.shape(1) == 0,
          "attention: shapes of q, k and v do not match");
  require(q.size() > 0 && k.size() > 0 && v.size() > 0, "attention: empty input");
  require(q.shape(3) <= 4096 && value_dim <= 4096, "attention: the head dimension is over 4096");
  require(o.window >= 0, "attention: the window is negative");
  AttentionNode node{scale,    o.causal, o.mask.has_value(), o.sinks.has_value(), o.start.has_value(),
                     o.window, o.bits,   o.group};
  if (type != mx::float32) node.scale = as_floats(mx::astype(array(scale), type, cpu_stream())).item<float>();
  std::vector<array> inputs{q, k, v};
  if (o.mask) {
    require(o.mask->ndim() <= 4, "attention: a mask has at most four axes");
    require(o.mask->dtype() == mx::bool_ || mx::promote_types(o.mask->dtype(), type) == type,
            "attention: an additive mask must promote to the type of q, k and v");
    const array m = o.mask->dtype() == mx::bool_ ? *o.mask : as_type(*o.mask, type);
    inputs.push_back(mx::broadcast_to(m, {q.shape(0), q.shape(1), q.shape(2), k.shape(2)}, cpu_stream()));
  }
  if (o.sinks) {
    require(o.sinks->ndim() == 1 && o.sinks->shape(0) == q.shape(1), "attention: sinks have one value a head");
    inputs.push_back(as_floats(*o.sinks));
  }
  if (o.start) {
    require(o.start->ndim() == 1 && o.start->shape(0) == q.shape(0), "attention: start has one value a row");
    inputs.push_back(as_type(*o.start, mx::int32));
  }
  inputs.insert(inputs.end(), o.groups.begin(), o.groups.end());
  mx::Shape shape{q.shape(0), q.shape(1), q.shape(2), value_dim};
  return array(shape, type, std::make_shared<Attention>(cpu_stream(), node), std::move(inputs));
}

array kv_write(const array& buffer, const array& rows, const array& position, const Optional& count) {
  require(buffer.ndim() == 4 && rows.ndim() == 4 && rows.dtype() == buffer.dtype(), "kv_write: buffers do not match");
  require(is_float(buffer.dtype()), "kv_write: expected floats");
  require(rows.shape(0) == buffer.shape(0) && rows.shape(1) == buffer.shape(1) && rows.shape(3) == buffer.shape(3),
          "kv_write: shapes do not match");
  require(position.ndim() == 1 && position.shape(0) == buffer.shape(0), "kv_write: position has one value a row");
  require(!count || (count->ndim() == 1 && count->shape(0) == buffer.shape(0)), "kv_write: count has one value a row");
  std::vector<array> inputs{buffer, rows, as_type(position, mx::int32)};
  if (count) inputs.push_back(as_type(*count, mx::int32));
  auto node = std::make_shared<KVWrite>(cpu_stream(), count.has_value());
  return array(buffer.shape(), buffer.dtype(), std::move(node), std::move(inputs));
}

}  // namespace mantou
