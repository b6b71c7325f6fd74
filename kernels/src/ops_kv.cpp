// Packing, unpacking and writing rows of keys and values as MLX primitives.
#include "ops_kv.h"

#include <cstring>

#include "pool.h"

namespace mantou {
namespace {

class Pack : public CpuPrimitive {
 public:
  Pack(mx::Stream s, int bits, int group) : CpuPrimitive(s), bits_(bits), group_(group) {}
  const char* name() const override { return "MantouPack"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    for (array& o : outputs) allocate(o);
    dispatch(inputs, outputs, [bits = bits_, group = group_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch, memory;
      const uint8_t* x = contiguous(in[0], scratch);
      const int dim = in[0].shape(3), groups = dim / group, rows = static_cast<int>(in[0].size() / dim);
      const Scalar type = scalar_of(in[0].dtype());
      float* v = memory.floats(dim);
      for (int r = 0; r < rows; ++r) {
        const size_t at = static_cast<size_t>(r) * groups * size_of(type);
        kernels().load(x, static_cast<size_t>(r) * dim, type, dim, v);
        kernels().quantise(v, dim, bits, group, type, out[0].data<uint8_t>() + static_cast<size_t>(r) * dim * bits / 8,
                           out[1].data<uint8_t>() + at, out[2].data<uint8_t>() + at);
      }
    });
  }

 private:
  int bits_, group_;
};

struct WriteNode {
  int first_slot, ring, shift;
  bool counted, paged;
};

class KVWrite : public CpuPrimitive {
 public:
  KVWrite(mx::Stream s, WriteNode node) : CpuPrimitive(s), node_(node) {}
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
    dispatch(inputs, outputs, [reuse, node = node_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[4];
      if (!reuse) std::memcpy(out[0].data<uint8_t>(), contiguous(in[0], scratch[0]), out[0].nbytes());
      write(node, in[1], contiguous_as<int32_t>(in[2], scratch[1]),
            node.counted ? contiguous_as<int32_t>(in[3], scratch[2]) : nullptr, table(node, in, scratch[3]), out[0]);
    });
  }

 private:
  static BlockTable table(const WriteNode& node, std::vector<array>& in, Scratch& scratch) {
    if (!node.paged) return {};
    const array& table = in[3 + node.counted];
    return {contiguous_as<int32_t>(table, scratch), table.shape(1), node.shift};
  }

  static void write(const WriteNode& node, const array& rows, const int32_t* position, const int32_t* count,
                    const BlockTable& table, array& out) {
    const int batch = rows.shape(0), heads = out.shape(1), capacity = out.shape(2), tokens = rows.shape(2);
    const size_t bytes = out.itemsize() * out.shape(3);
    for (int b = 0; b < batch; ++b) {
      const int n = count != nullptr ? count[b] : tokens;
      const int64_t room = node.ring > 0 ? INT32_MAX : capacity;
      if (n < 0 || n > tokens || position[b] < 0 || position[b] + int64_t{n} > (node.paged ? table.capacity() : room) ||
          (node.paged && n > 0 && !table.fits(b, position[b] + n, capacity)))
        throw std::out_of_range("[mantou_kernels] kv_write: row " + std::to_string(b) + " would write columns " +
                                std::to_string(position[b]) + ".." + std::to_string(position[b] + n) + " of " +
                                std::to_string(capacity));
    }
    static thread_local Scratch scratch;
    const View4 from = view_of(rows, scratch);
    for (int b = 0; b < batch; ++b)
      for (int h = 0; h < heads; ++h) {
        const int n = count != nullptr ? count[b] : tokens;
        const size_t slot = node.paged ? 0 : static_cast<size_t>(node.first_slot) + b;
        uint8_t* to = out.data<uint8_t>() + (slot * heads + h) * capacity * bytes;
        for (int t = 0; t < n; ++t) {
          const int column = node.ring > 0 ? (position[b] + t) % node.ring : table.column(b, position[b] + t);
          std::memcpy(to + column * bytes, from.at(b, h, t), bytes);
        }
      }
  }

  WriteNode node_;
};

void require_packing(int bits, int group, const char* what) {
  require((bits == 4 || bits == 8) && (group == 32 || group == 64 || group == 128),
          std::string(what) + ": 4 or 8 bits in groups of 32, 64 or 128");
}

}  // namespace

void Unpack::eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) {
  allocate(outputs[0]);
  dispatch(inputs, outputs, [bits = bits_, group = group_](std::vector<array>& in, std::vector<array>& out) {
    static thread_local Scratch scratch[3];
    const View4 rows = view_of(in[0], scratch[0]), scales = view_of(in[1], scratch[1]), biases = view_of(in[2], scratch[2]);
    const int heads = out[0].shape(1), tokens = out[0].shape(2), dim = out[0].shape(3);
    const Scalar type = scalar_of(out[0].dtype());
    const double cost_us = static_cast<double>(out[0].size()) * 2e-4;
    Pool::instance().run(out[0].shape(0) * heads, 1, cost_us, [&](int begin, int end) {
      static thread_local Scratch memory;
      float* v = memory.floats(dim);
      for (int i = begin; i < end; ++i) {
        const int b = i / heads, h = i % heads;
        for (int t = 0; t < tokens; ++t) {
          kernels().unpack(rows.at(b, h, t), {bits, group, scales.at(b, h, t), biases.at(b, h, t), 0}, type, dim, v);
          kernels().store(v, dim, type, out[0].data<uint8_t>(), (static_cast<size_t>(i) * tokens + t) * dim);
        }
      }
    });
  });
}

std::vector<array> pack_rows(const array& x, int bits, int group) {
  require_packing(bits, group, "pack_rows");
  require(x.ndim() == 4 && is_float(x.dtype()) && x.size() > 0 && x.shape(3) % group == 0, "pack_rows: wrong input");
  mx::Shape words = x.shape(), groups = x.shape();
  words[3] = x.shape(3) * bits / 32, groups[3] = x.shape(3) / group;
  return array::make_arrays({words, groups, groups}, {mx::uint32, x.dtype(), x.dtype()},
                            std::make_shared<Pack>(cpu_stream(), bits, group), {x});
}

array unpack_rows(const array& words, const array& scales, const array& biases, int bits, int group) {
  require_packing(bits, group, "unpack_rows");
  require(words.ndim() == 4 && words.dtype() == mx::uint32 && is_float(scales.dtype()) && biases.dtype() == scales.dtype(),
          "unpack_rows: wrong input");
  mx::Shape shape = words.shape();
  shape[3] = words.shape(3) * 32 / bits;
  mx::Shape groups = shape;
  groups[3] = shape[3] / group;
  require(shape[3] % group == 0 && scales.shape() == groups && biases.shape() == groups, "unpack_rows: shapes do not match");
  return array(shape, scales.dtype(), std::make_shared<Unpack>(cpu_stream(), bits, group), {words, scales, biases});
}

int block_shift(const array& table, int block, int batch, const char* what) {
  int shift = 4;
  while (shift < 16 && 1 << shift < block) ++shift;
  require(1 << shift == block, std::string(what) + ": a block has 16, 32, 64, ... columns");
  require(table.ndim() == 2 && table.shape(0) == batch && table.size() > 0, std::string(what) + ": the table has a row for each row");
  return shift;
}

array kv_write(const array& buffer, const array& rows, const array& position, const Optional& count, const WriteOptions& o) {
  const int first_slot = o.first_slot, ring = o.ring;
  require(buffer.ndim() == 4 && rows.ndim() == 4 && rows.dtype() == buffer.dtype(), "kv_write: buffers do not match");
  const int batch = rows.shape(0);
  require(o.table ? buffer.shape(0) == 1 && first_slot == 0 && ring == 0 : first_slot + batch <= buffer.shape(0),
          "kv_write: shapes do not match");
  const int shift = o.table ? block_shift(*o.table, o.block, batch, "kv_write") : 0;
  require(first_slot >= 0 && rows.shape(1) == buffer.shape(1) &&
              rows.shape(3) == buffer.shape(3),
          "kv_write: shapes do not match");
  require(ring >= 0 && ring <= buffer.shape(2) && (ring == 0 || rows.shape(2) <= ring), "kv_write: the ring does not fit");
  require(position.ndim() == 1 && position.shape(0) == batch, "kv_write: position has one value a row");
  require(!count || (count->ndim() == 1 && count->shape(0) == batch), "kv_write: count has one value a row");
  std::vector<array> inputs{buffer, rows, as_type(position, mx::int32)};
  if (count) inputs.push_back(as_type(*count, mx::int32));
  if (o.table) inputs.push_back(as_type(*o.table, mx::int32));
  auto node = std::make_shared<KVWrite>(cpu_stream(), WriteNode{first_slot, ring, shift, count.has_value(), o.table.has_value()});
  return array(buffer.shape(), buffer.dtype(), std::move(node), std::move(inputs));
}

}  // namespace mantou
