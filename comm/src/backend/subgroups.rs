//! The groups that were made from a group, and from those.

use std::sync::{Arc, Mutex, Weak};

use crate::Communicator;
use crate::base::lock;

/// Subgroups of a group and of its subgroups, as far as they are still in use.
#[derive(Clone, Default)]
pub(super) struct Subgroups(Arc<Mutex<Vec<Weak<dyn Communicator>>>>);

impl Subgroups {
    /// Adds a group, and returns it.
    pub(super) fn add(&self, group: impl Communicator + 'static) -> Arc<dyn Communicator> {
        let group: Arc<dyn Communicator> = Arc::new(group);
        let mut groups = lock(&self.0);
        groups.retain(|group| group.strong_count() > 0);
        groups.push(Arc::downgrade(&group));
        group
    }

    /// Ends them, because this rank continues in another group: ranks that still wait in them for this one continue there,
    /// too.
    pub(super) fn abort(&self) {
        let groups = std::mem::take(&mut *lock(&self.0));
        groups.iter().filter_map(Weak::upgrade).for_each(|group| group.abort());
    }
}
