// What a captured decode step saw of a model, compared by identity before each token. Python's loop over
// some hundred entries would cost as much as a layer. See src/qwen_metal/models/decode_step.py.
#include <nanobind/stl/tuple.h>

#include "primitive.h"

namespace qwen_metal {
namespace {

// Modules (dictionaries, of a class) and lists: their classes and sizes; entries of them, and what stood there.
class Seen {
 public:
  Seen(nb::sequence holders, nb::sequence entries) {
    for (nb::handle holder : holders) {
      holders_.push_back({nb::borrow(holder), nb::borrow(holder.type()), PyObject_Size(holder.ptr())});
    }
    for (nb::handle entry : entries) {
      const auto [held, key, value] = nb::cast<std::tuple<nb::object, nb::object, nb::object>>(entry);
      entries_.push_back({held, key, value});
    }
  }

  bool holds() const {
    for (const auto& h : holders_) {
      const Py_ssize_t size = PyObject_Size(h.held.ptr());
      if (size < 0) {
        throw nb::python_error();
      }
      if (size != h.size || h.held.type().ptr() != h.type.ptr()) {
        return false;
      }
    }
    for (const auto& e : entries_) {
      PyObject* now = nullptr;
      if (PyDict_Check(e.held.ptr())) {
        now = PyDict_GetItemWithError(e.held.ptr(), e.key.ptr());
      } else if (PyList_Check(e.held.ptr())) {
        const Py_ssize_t i = PyLong_AsSsize_t(e.key.ptr());
        now = i >= 0 && i < PyList_Size(e.held.ptr()) ? PyList_GetItem(e.held.ptr(), i) : nullptr;
      }
      if (PyErr_Occurred()) {
        throw nb::python_error();
      }
      if (now != e.value.ptr()) {
        return false;
      }
    }
    return true;
  }

 private:
  struct Holder {
    nb::object held, type;
    Py_ssize_t size;
  };
  struct Entry {
    nb::object held, key, value;
  };
  std::vector<Holder> holders_;
  std::vector<Entry> entries_;
};

}  // namespace
}  // namespace qwen_metal

void init_decode_step(nb::module_& m) {
  using qwen_metal::Seen;
  nb::class_<Seen>(m, "Seen", "Holders (modules, lists) and entries (holder, key, value), and whether they still stand.")
      .def(nb::init<nb::sequence, nb::sequence>(), "holders"_a, "entries"_a)
      .def("holds", &Seen::holds);
}
