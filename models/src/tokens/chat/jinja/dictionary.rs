//! Messages and tools as templates see them.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, State, Value};

use super::methods;

/// Dictionary of a message or tool. Its methods hide fields of their names where it is read as `message.items`, as in Python.
#[derive(Debug)]
struct Dictionary(Value);

impl Object for Dictionary {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.0.get_item(key).ok().filter(|value| !value.is_undefined())
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        if methods::OF_DICTIONARIES.contains(&key) {
            let (of, name) = (Value::from_dyn_object(self.clone()), key.to_string());
            return Some(Value::from_object(BoundMethod { of, name }));
        }
        self.0.get_attr(key).ok().filter(|value| !value.is_undefined())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        match self.0.try_iter() {
            Ok(keys) => Enumerator::Values(keys.collect()),
            Err(_) => Enumerator::Empty,
        }
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        self.0.len()
    }
}

/// Method of a dictionary that is not called at once.
#[derive(Debug)]
struct BoundMethod {
    of: Value,
    name: String,
}

impl Object for BoundMethod {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, state: &mut State<'_, '_>, arguments: &[Value]) -> Result<Value, Error> {
        methods::call(state, &self.of, &self.name, arguments)
    }
}

/// Returns data as templates see it.
pub(in super::super) fn plain_data(value: &Value) -> Value {
    match value.kind() {
        ValueKind::Map => {
            let keys = value.try_iter().into_iter().flatten();
            let item = |key: &Value| value.get_item(key).unwrap_or_default();
            let pairs = keys.map(|key| (key.clone(), plain_data(&item(&key))));
            Value::from_object(Dictionary(Value::from_pairs(pairs)))
        }
        ValueKind::Seq => value.try_iter().into_iter().flatten().map(|item| plain_data(&item)).collect(),
        _ => value.clone(),
    }
}
