//! Device mesh: ranks in a grid of named axes, with a group along each axis.

use std::sync::Arc;

use crate::api::difference::{LineDifference, line_difference};
use crate::{Communicator, Error, Result};

/// The ranks of a group as a grid, with one axis for each kind of parallelism. Along each axis, the ranks that differ
/// only in that coordinate form a group.
///
/// Neighbours along the last axis have consecutive ranks: use it for the axis that communicates most.
///
/// ```
/// use std::sync::Arc;
/// use comm::{Communicator, Local, LocalConfig, Mesh};
///
/// let ranks = Local::group(4, &LocalConfig::default())?;
/// let threads = ranks.into_iter().map(|comm| {
///     std::thread::spawn(move || {
///         let mesh = Mesh::new(Arc::new(comm), &[("dp", 2), ("tp", 2)])?;
///         Ok(mesh.axis("tp")?.world_ranks().to_vec())
///     })
/// });
/// let threads: Vec<_> = threads.collect();
/// let groups: comm::Result<Vec<_>> = threads.into_iter().map(|thread| thread.join().unwrap()).collect();
/// assert_eq!(groups?, [[0, 1], [0, 1], [2, 3], [2, 3]]);
/// # Ok::<(), comm::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Mesh {
    world: Arc<dyn Communicator>,
    axes: Vec<Axis>,
}

#[derive(Debug, Clone)]
struct Axis {
    name: String,
    comm: Arc<dyn Communicator>,
}

impl Mesh {
    /// Divides the ranks of `comm` along `axes`, each a name and a size. Every rank of the group must call this.
    ///
    /// # Cost
    /// An all-gather of 24 bytes a rank, and a [`Communicator::split`] for each axis.
    ///
    /// # Errors
    /// Sizes whose product is not the world size, a size of 0, a name that is given twice; on every rank, other axes on
    /// one rank than on another; those of [`Communicator::split`].
    pub fn new(comm: Arc<dyn Communicator>, axes: &[(&str, usize)]) -> Result<Self> {
        let refuse = |got: String, help: &str| Err(Error::invalid("the axes of a mesh", got, help));
        for (index, (name, _)) in axes.iter().enumerate() {
            if axes[..index].iter().any(|(other, _)| other == name) {
                return refuse(format!("{name} twice"), "give each axis a name of its own");
            }
        }
        let product = axes.iter().try_fold(1usize, |product, (_, size)| product.checked_mul(*size));
        if product != Some(comm.world_size()) {
            let help = format!("their product must be the world size, {}", comm.world_size());
            return refuse(format!("{axes:?}"), &help);
        }
        agree(&*comm, axes)?;
        let rank = comm.rank();
        let mut stride = comm.world_size();
        let mut made = Vec::with_capacity(axes.len());
        for (name, size) in axes {
            stride /= size;
            let coordinate = rank / stride % size;
            // Ranks of one color differ only in this coordinate.
            let color = rank - coordinate * stride;
            let Some(group) = comm.split(Some(color), coordinate)? else { continue };
            made.push(Axis { name: (*name).into(), comm: group });
        }
        Ok(Self { world: comm, axes: made })
    }

    /// Returns the group along an axis. This rank's coordinate is its rank in that group.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name that no axis has.
    pub fn axis(&self, name: &str) -> Result<&Arc<dyn Communicator>> {
        let axis = self.axes.iter().find(|axis| axis.name == name);
        axis.map(|axis| &axis.comm).ok_or_else(|| {
            let names: Vec<_> = self.axes.iter().map(|axis| axis.name.as_str()).collect();
            Error::invalid("the axis of a mesh", name, format!("give one of {}", names.join(", ")))
        })
    }

    /// Returns the group of the ranks that differ from this one only along `axes`, in the order of the mesh. All of
    /// these ranks must call it.
    ///
    /// # Cost
    /// None if the plane is the whole mesh, or the group of one of the axes (all others have one rank); otherwise the ranks connect as
    /// at the start of a job.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for a name that no axis has, or that is given twice; those of [`Communicator::subgroup`].
    ///
    /// ```
    /// use comm::{Communicator, Local, Mesh};
    ///
    /// let groups = Local::run_shared(8, |comm| {
    ///     let mesh = Mesh::new(comm, &[("pp", 2), ("dp", 2), ("tp", 2)])?;
    ///     Ok(mesh.plane(&["pp", "tp"])?.world_ranks().to_vec())
    /// })?;
    /// assert_eq!(groups[1], [0, 1, 4, 5]);
    /// assert_eq!(groups[2], [2, 3, 6, 7]);
    /// # Ok::<(), comm::Error>(())
    /// ```
    pub fn plane(&self, axes: &[&str]) -> Result<Arc<dyn Communicator>> {
        for (index, name) in axes.iter().enumerate() {
            self.axis(name)?;
            if axes[..index].contains(name) {
                let help = "give different ones";
                return Err(Error::invalid("the axes of a plane", format!("{name} twice"), help));
            }
        }
        let all: Vec<_> = self.axes().collect();
        let ranks = plane(&all, &self.coordinates(), axes);
        let has_plane = |axis: &&Axis| axes.contains(&&*axis.name) && axis.comm.world_size() == ranks.len();
        match self.axes.iter().find(has_plane) {
            _ if ranks.len() == self.world.world_size() => Ok(self.world.clone()),
            Some(axis) => Ok(axis.comm.clone()),
            None => self.world.subgroup(&ranks),
        }
    }

    /// Returns this rank's coordinates, by axis.
    pub fn coordinates(&self) -> Vec<usize> {
        self.axes.iter().map(|axis| axis.comm.rank()).collect()
    }

    /// Returns the names and sizes of the axes, as given to [`Mesh::new`].
    pub fn axes(&self) -> impl Iterator<Item = (&str, usize)> {
        self.axes.iter().map(|axis| (axis.name.as_str(), axis.comm.world_size()))
    }

    /// Returns the group of all ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }
}

/// Checks that every rank gives the same axes. The result is the same on every rank.
fn agree(comm: &dyn Communicator, axes: &[(&str, usize)]) -> Result<()> {
    let own: Vec<String> = axes.iter().map(|(name, size)| format!("{name}={size}")).collect();
    let Some(LineDifference { odd_rank, rank, .. }) = line_difference(comm, 0, &own)? else { return Ok(()) };
    let got = format!("other ones on rank {odd_rank} than on rank {rank} (here {})", own.join(","));
    Err(Error::invalid("the axes of a mesh", got, "give every rank the same axes"))
}

/// Returns the ranks of a mesh that differ from the one at `own` only in the axes `free`, in ascending order.
fn plane(axes: &[(&str, usize)], own: &[usize], free: &[&str]) -> Vec<usize> {
    let mut ranks = vec![0];
    // Row-major: neighbours along the last axis have consecutive ranks.
    for ((name, size), own) in axes.iter().zip(own) {
        let places = if free.contains(name) { 0..*size } else { *own..own + 1 };
        ranks = ranks.iter().flat_map(|rank| places.clone().map(move |place| rank * size + place)).collect();
    }
    ranks
}

#[cfg(test)]
mod tests {
    use super::plane;

    #[test]
    fn a_plane_goes_through_its_own_rank() {
        let axes = [("pp", 2), ("dp", 3), ("shard", 2)];
        let free = ["shard", "dp"];
        assert_eq!(plane(&axes, &[0, 1, 1], &free), [0, 1, 2, 3, 4, 5]);
        assert_eq!(plane(&axes, &[1, 0, 0], &free), [6, 7, 8, 9, 10, 11]);
        assert_eq!(plane(&axes, &[0, 2, 1], &["pp", "shard"]), [4, 5, 10, 11]);
        assert_eq!(plane(&axes, &[1, 2, 1], &["pp", "dp"]), [1, 3, 5, 7, 9, 11]);
    }
}
