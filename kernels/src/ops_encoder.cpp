// Encoder layers as one MLX primitive.
#include "bridge.h"
#include "encoder.h"
#include "ops.h"

namespace mantou {
namespace {

using Layers = std::vector<std::shared_ptr<const EncoderSpec>>;

class Encoder : public CpuPrimitive {
 public:
  Encoder(mx::Stream s, Layers layers) : CpuPrimitive(s), layers_(std::move(layers)) {}
  const char* name() const override { return "MantouEncoder"; }
  void eval_cpu(const std::vector<array>& inputs, std::vector<array>& outputs) override {
    allocate(outputs[0]);
    dispatch(inputs, outputs, [layers = layers_](std::vector<array>& in, std::vector<array>& out) {
      static thread_local Scratch scratch[2];
      EncoderCall c;
      c.layers = &layers;
      c.x = contiguous(in[0], scratch[0]);
      c.out = out[0].data<uint8_t>();
      c.type = scalar_of(out[0].dtype());
      c.batch = in[0].shape(0), c.tokens = in[0].shape(1);
      if (in.size() > 1) c.lengths = contiguous_as<int32_t>(in[1], scratch[1]);
      run_encoder(kernels(), c);
    });
  }

 private:
  Layers layers_;
};

}  // namespace

std::shared_ptr<EncoderSpec> make_encoder_layer(const EncoderParts& p) {
  auto s = std::make_shared<EncoderSpec>();
  s->qkv = p.qkv, s->out = p.out, s->up = p.up, s->down = p.down;
  s->qkv_bias = floats_of(p.qkv_bias), s->out_bias = floats_of(p.out_bias);
  s->up_bias = floats_of(p.up_bias), s->down_bias = floats_of(p.down_bias);
  s->attention_norm = floats_of(p.attention_norm), s->attention_norm_bias = floats_of(p.attention_norm_bias);
  s->norm = floats_of(p.norm), s->norm_bias = floats_of(p.norm_bias);
  s->eps = p.eps, s->heads = p.heads, s->scale = p.scale;
  s->activation = gate_of(p.activation);
  check_encoder(*s);
  return s;
}

array encoder(const array& x, const std::vector<std::shared_ptr<EncoderSpec>>& layers, const Optional& lengths) {
  require(!layers.empty() && x.ndim() == 3 && x.size() > 0 && is_float(x.dtype()), "encoder: wrong input");
  for (const auto& layer : layers)
    require(layer != nullptr && layer->qkv->layout.k == x.shape(2), "encoder: a layer has another width than its input");
  require(x.size() / x.shape(2) < (size_t{1} << 24), "encoder: too many rows");
  std::vector<array> inputs{x};
  if (lengths) {
    require(lengths->ndim() == 1 && lengths->shape(0) == x.shape(0), "encoder: lengths have one value a row");
    inputs.push_back(as_type(*lengths, mx::int32));
  }
  return array(x.shape(), x.dtype(), std::make_shared<Encoder>(cpu_stream(), Layers(layers.begin(), layers.end())),
               std::move(inputs));
}

}  // namespace mantou
