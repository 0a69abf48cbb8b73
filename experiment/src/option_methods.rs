//! Macro for the common option methods of an experiment.

/// Implements methods of [`Experiment`](crate::Experiment) by returning the fields of the same names: `common`,
/// `checkpoints`, `elastic`, and `epochs` or `steps` as its end.
#[macro_export]
macro_rules! options_of {
    (@common) => {
        fn common(&self) -> &$crate::options::CommonOptions {
            &self.common
        }

        fn with_common(&self, common: $crate::options::CommonOptions) -> Self {
            Self { common, ..self.clone() }
        }
    };
    (@checkpoints) => {
        fn checkpoints(&self) -> Option<&$crate::options::CheckpointOptions> {
            Some(&self.checkpoints)
        }
    };
    (@elastic) => {
        fn elastic_options(&self) -> Option<$crate::options::ElasticOptions> {
            Some(self.elastic)
        }

        fn stand_in(&self) -> Option<()> {
            Some(())
        }
    };
    (@epochs) => {
        fn end(&self) -> Option<$crate::trainer::RunEnd> {
            Some($crate::trainer::RunEnd::Epochs(self.epochs))
        }
    };
    (@steps) => {
        fn end(&self) -> Option<$crate::trainer::RunEnd> {
            Some($crate::trainer::RunEnd::Steps(self.steps))
        }
    };
    ($($name:ident),*) => { $($crate::options_of!(@$name);)* };
}
