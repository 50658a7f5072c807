#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <span>

namespace fox::eval {

/// `value` with `digits` significant decimal digits, so that JSON files stay small; null when it is not finite.
nlohmann::json rounded(double value, int digits = 7);
nlohmann::json rounded(const std::optional<double>& value, int digits = 7);
nlohmann::json rounded(std::span<const double> values, int digits = 7);
nlohmann::json rounded(std::span<const float> values, int digits = 7);

}  // namespace fox::eval
