// Recurrences over time: the gated delta rule and the Mamba-2 state. Included once per instruction set.
//
// Each row of the state is walked through all steps before the next row, so it stays in registers or L1. A step is
// the same arithmetic whether it comes alone or in a long prompt.

// state = g * state; delta = beta * (v - state.k); state += delta * k; y = state.q   (per value row)
static void gated_delta(const DeltaTask& t) {
  for (int row = 0; row < t.value_dim; ++row) {
    float* state = t.state + static_cast<size_t>(row) * t.key_dim;
    for (int step = 0; step < t.steps; ++step) {
      float* y = t.y + step * t.y_stride + row;
      if (t.mask != nullptr && !t.mask[step]) {
        *y = 0.0f;
        continue;
      }
      const float *q = t.q + step * t.q_stride, *k = t.k + step * t.k_stride, *g = t.g + step * t.g_stride;
      const float seen = sum_row(t.key_dim, [&](int i, int lanes, Vf acc) {
        const Vf decay = t.vector_gate ? load_n(g + i, lanes) : set1(*g);
        const Vf s = mul(load_n(state + i, lanes), decay);
        store_n(state + i, s, lanes);
        return fma(s, load_n(k + i, lanes), acc);
      });
      const Vf delta = set1((t.v[step * t.v_stride + row] - seen) * t.beta[step * t.beta_stride]);
      *y = sum_row(t.key_dim, [&](int i, int lanes, Vf acc) {
        const Vf s = fma(load_n(k + i, lanes), delta, load_n(state + i, lanes));
        store_n(state + i, s, lanes);
        return fma(s, load_n(q + i, lanes), acc);
      });
    }
  }
}

// state = exp(dt a) state + dt x B; y = state.C + d x   (per head channel)
static void ssm(const SsmTask& t) {
  for (int row = 0; row < t.head_dim; ++row) {
    float* state = t.state + static_cast<size_t>(row) * t.state_dim;
    for (int step = 0; step < t.steps; ++step) {
      const float x = t.x[step * t.x_stride + row], dt = t.dt[step * t.dt_stride];
      const bool live = t.mask == nullptr || t.mask[step];
      const Vf decay = set1(live ? std::exp(dt * t.a) : 1.0f), input = set1(live ? dt * x : 0.0f);
      const float *b = t.b + step * t.b_stride, *c = t.c + step * t.c_stride;
      const float read = sum_row(t.state_dim, [&](int i, int lanes, Vf acc) {
        const Vf s = fma(input, load_n(b + i, lanes), mul(load_n(state + i, lanes), decay));
        store_n(state + i, s, lanes);
        return fma(s, load_n(c + i, lanes), acc);
      });
      t.y[step * t.y_stride + row] = read + t.d * x;
    }
  }
}
