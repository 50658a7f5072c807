#include "ops/device_graph.h"

namespace fox::ops {
namespace {

auto& graph_maker() {
  static std::unique_ptr<DeviceGraph> (*make)(at::Device) = nullptr;
  return make;
}

}  // namespace

void register_device_graph(std::unique_ptr<DeviceGraph> (*make)(at::Device)) { graph_maker() = make; }

std::unique_ptr<DeviceGraph> DeviceGraph::make(at::Device device) {
  return graph_maker() ? graph_maker()(device) : nullptr;
}

}  // namespace fox::ops
