#include "base/protobuf_fields.h"

#include <google/protobuf/io/coded_stream.h>
#include <google/protobuf/wire_format_lite.h>

#include <limits>

namespace fox {
namespace {

using google::protobuf::io::CodedInputStream;
using Wire = google::protobuf::internal::WireFormatLite;

bool read_value(CodedInputStream& input, uint32_t tag, std::string_view message, ProtobufField& field) {
  uint32_t narrow = 0;
  switch (Wire::GetTagWireType(tag)) {
    case Wire::WIRETYPE_VARINT:
      return input.ReadVarint64(&field.value);
    case Wire::WIRETYPE_FIXED64:
      return input.ReadLittleEndian64(&field.value);
    case Wire::WIRETYPE_FIXED32:
      if (!input.ReadLittleEndian32(&narrow)) return false;
      field.value = narrow;
      return true;
    case Wire::WIRETYPE_LENGTH_DELIMITED: {
      if (!input.ReadVarint32(&narrow)) return false;
      const auto at = static_cast<size_t>(input.CurrentPosition());
      if (narrow > message.size() - at || !input.Skip(static_cast<int>(narrow))) return false;
      field.bytes = message.substr(at, narrow);
      return true;
    }
    default:  // groups, which nobody writes any more
      return false;
  }
}

}  // namespace

bool read_protobuf(std::string_view message, const std::function<void(const ProtobufField&)>& take) {
  if (message.size() > static_cast<size_t>(std::numeric_limits<int>::max())) return false;
  CodedInputStream input(reinterpret_cast<const uint8_t*>(message.data()), static_cast<int>(message.size()));
  while (static_cast<size_t>(input.CurrentPosition()) < message.size()) {
    const uint32_t tag = input.ReadTag();
    ProtobufField field{Wire::GetTagFieldNumber(tag), 0, {}};
    if (field.number == 0 || !read_value(input, tag, message, field)) return false;
    take(field);
  }
  return true;
}

}  // namespace fox
