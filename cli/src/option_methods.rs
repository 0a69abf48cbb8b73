//! Macros for the methods of an experiment that return its options.

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

/// Returns fields of an experiment as its [settings](crate::Experiment::settings), by the names of their options. A field
/// whose value is not displayed as it is takes another: `settings!(self, lr, batch_size, loss = "mse".into())` has `--lr`,
/// `--batch-size` and `--loss`.
#[macro_export]
macro_rules! settings {
    (@value $options:ident, $field:ident) => {
        $options.$field.to_string()
    };
    (@value $options:ident, $field:ident, $value:expr) => {
        $value
    };
    ($options:ident, $($field:ident $(= $value:expr)?),* $(,)?) => {
        vec![$(
            ($crate::options::option_of_field(stringify!($field)), $crate::settings!(@value $options, $field $(, $value)?))
        ),*]
    };
}
