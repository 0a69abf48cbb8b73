//! Values of Python that minijinja has no type for.

use std::fmt;
use std::sync::{Arc, Mutex};

use minijinja::Value;
use minijinja::value::{Enumerator, Object, ObjectRepr};
use training::internal::lock;

/// What `safe` and `escape` give. Python escapes what is added to such a string, so adding to it is an error here.
#[derive(Debug)]
pub(super) struct Markup(pub(super) String);

impl Object for Markup {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn is_true(self: &Arc<Self>) -> bool {
        !self.0.is_empty()
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A generator or iterator: its items can be taken once, and it has neither length nor items by number.
#[derive(Debug)]
pub(super) struct Generator {
    /// The filter that made it.
    pub(super) made_by: &'static str,
    items: Mutex<Option<Vec<Value>>>,
}

impl Generator {
    pub(super) fn value(made_by: &'static str, items: Vec<Value>) -> Value {
        Value::from_object(Self { made_by, items: Mutex::new(Some(items)) })
    }
}

impl Object for Generator {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, _: &Value) -> Option<Value> {
        // Otherwise minijinja would count items.
        Some(Value::UNDEFINED)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let items = lock(&self.items).take();
        Enumerator::Iter(Box::new(items.unwrap_or_default().into_iter()))
    }

    fn enumerator_len(self: &Arc<Self>) -> Option<usize> {
        None
    }
}

/// `range(…)`.
#[derive(Debug)]
pub(super) struct Range {
    pub(super) start: i64,
    pub(super) stop: i64,
    pub(super) step: i64,
}

impl Range {
    fn len(&self) -> usize {
        let (distance, step) = match self.step > 0 {
            true => (self.stop.saturating_sub(self.start), self.step),
            false => (self.start.saturating_sub(self.stop), self.step.saturating_neg()),
        };
        usize::try_from(distance.max(0)).unwrap_or(usize::MAX).div_ceil(step.max(1) as usize)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            1 => write!(f, "range({}, {})", self.start, self.stop),
            step => write!(f, "range({}, {}, {step})", self.start, self.stop),
        }
    }
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let place = key.as_usize().filter(|place| *place < self.len())?;
        Some(Value::from(self.start + place as i64 * self.step))
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.len())
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// What `items()`, `keys()` and `values()` of a dictionary give.
#[derive(Debug)]
pub(super) struct View {
    pub(super) kind: &'static str,
    pub(super) items: Vec<Value>,
}

impl Object for View {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn get_value(self: &Arc<Self>, _: &Value) -> Option<Value> {
        // Otherwise minijinja would count items.
        Some(Value::UNDEFINED)
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.items.clone())
    }
}

/// Whether a value is a `namespace(…)`, which minijinja has no public type for.
pub(super) fn is_namespace(value: &Value) -> bool {
    value.as_object().is_some_and(|object| object.type_name().ends_with("::Namespace"))
}

/// A group of `groupby`: a pair of the value and the items, which have the names `grouper` and `list`.
#[derive(Debug)]
pub(super) struct Group(pub(super) Value, pub(super) Value);

impl Object for Group {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        match key.as_usize() {
            Some(0) => Some(self.0.clone()),
            Some(1) => Some(self.1.clone()),
            _ => self.get_value_by_str(key.as_str()?),
        }
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Value> {
        match key {
            "grouper" => Some(self.0.clone()),
            "list" => Some(self.1.clone()),
            _ => None,
        }
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(2)
    }
}
