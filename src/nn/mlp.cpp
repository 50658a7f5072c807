#include "nn/mlp.h"

#include "ops/swiglu.h"

namespace fox::nn {

SwigluMlp::SwigluMlp(int64_t width, int64_t intermediate)
    : gate_proj(width, 2 * intermediate), down_proj(intermediate, width) {}

at::Tensor SwigluMlp::forward(const at::Tensor& x) const {
  return down_proj.forward(ops::swiglu(gate_proj.forward(x)));
}

void SwigluMlp::init(double std) {
  gate_proj.init(std);
  down_proj.init(std);
}

void SwigluMlp::collect(const std::string& prefix, Parameters& out) const {
  gate_proj.collect(prefix + "gate_proj.", out);
  down_proj.collect(prefix + "down_proj.", out);
}

}  // namespace fox::nn
