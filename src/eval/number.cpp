#include "eval/number.h"

#include <fmt/format.h>

#include <cmath>
#include <string>

namespace fox::eval {

nlohmann::json rounded(double value, int digits) {
  if (!std::isfinite(value)) return nullptr;
  return std::stod(fmt::format("{:.{}g}", value, digits));
}

nlohmann::json rounded(const std::optional<double>& value, int digits) {
  return value ? rounded(*value, digits) : nlohmann::json(nullptr);
}

nlohmann::json rounded(std::span<const double> values, int digits) {
  nlohmann::json out = nlohmann::json::array();
  for (double value : values) out.push_back(rounded(value, digits));
  return out;
}

nlohmann::json rounded(std::span<const float> values, int digits) {
  nlohmann::json out = nlohmann::json::array();
  for (float value : values) out.push_back(rounded(static_cast<double>(value), digits));
  return out;
}

}  // namespace fox::eval
