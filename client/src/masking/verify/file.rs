//! A file with the data of verification, for clients without the weights, such as the Python package.
//!
//! The format is safetensors. Forward checks are stored per part of a site, because such clients call single
//! parts; the checks of a whole site are their sums. The metadata field `commitments` has the hashes of the
//! sites' weights, concatenated in hexadecimal digits.
//!
//! ```text
//! SITE.PART.secret   u32 [checks, outputs of the part]     SITE.PART.effect   i64 [checks, columns]
//! SITE.back.secret   u32 [checks, columns]                 SITE.back.effect   i64 [checks, outputs]
//! SITE.bias          f32 [outputs]                         where there is one
//! ```

use std::{
    collections::HashMap,
    fmt::Write as _,
    fs::OpenOptions,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use model::linear_sites::{EvaluateSites, Site, SiteId};
use safetensors::{Dtype, SafeTensorError, tensor::TensorView};
use shmproto::layer::seeded_rows::SeededRows;
use zeroize::Zeroizing;

use super::{SiteCheck, bias, check};
use crate::{error::CallError, masking::Direction, secrets};

const FORMAT: &str = "freivalds 1";

/// Reason why the file was not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// The weights cannot be evaluated.
    #[error(transparent)]
    Weights(#[from] CallError),
    /// The tensors cannot be serialized.
    #[error("the checks cannot be written as safetensors")]
    Tensors(#[from] SafeTensorError),
    /// The disk fails, or the file exists already.
    #[error("cannot write {path}: {source}; name a new file on a disk with free space")]
    File {
        /// Path, as the user wrote it.
        path: String,
        /// Error of the operating system.
        source: io::Error,
    },
}

/// Computes checks from this process's own weights and writes them into a new file that only its owner may
/// read: an executor that knows them can send wrong answers. Calls `on_progress` with the numbers of finished
/// sites and of all sites.
///
/// # Errors
/// Fails as the variants of [`WriteError`] say.
pub fn write(
    base: &mut dyn EvaluateSites,
    path: &Path,
    on_progress: &mut dyn FnMut(usize, usize),
) -> Result<(), WriteError> {
    let mut tensors = Tensors::default();
    let mut secrets = SeededRows { key: secrets::key()?, first: 0 };
    let sites = base.sites().to_vec();
    let mut commitments = String::new();
    for (site, number) in sites.iter().zip(0..) {
        tensors.add_site(base, SiteId(number), site, &mut secrets)?;
        let ring = site.ring.ok_or(CallError::NoRing { site: number })?;
        for byte in ring.commitment {
            // Writing into memory cannot fail.
            let _ = write!(commitments, "{byte:02x}");
        }
        on_progress(number as usize + 1, sites.len());
    }
    let views: Vec<_> = tensors.0.iter().map(CheckTensor::view).collect::<Result<_, _>>()?;
    let said = [("format", FORMAT), ("commitments", &commitments)];
    let said: HashMap<_, _> = said.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
    let bytes = Zeroizing::new(safetensors::serialize(views, Some(said))?);
    let mut new = OpenOptions::new();
    let file = new.write(true).create_new(true).mode(0o600).open(path);
    let written = file.and_then(|mut file| file.write_all(&bytes).and_then(|()| file.sync_all()));
    written.map_err(|source| WriteError::File { path: path.display().to_string(), source })
}

#[derive(Default)]
struct Tensors(Vec<CheckTensor>);

struct CheckTensor {
    name: String,
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Zeroizing<Vec<u8>>,
}

impl CheckTensor {
    fn view(&self) -> Result<(&str, TensorView<'_>), SafeTensorError> {
        Ok((&self.name, TensorView::new(self.dtype, self.shape.clone(), &self.bytes)?))
    }
}

impl Tensors {
    fn add_site(
        &mut self,
        base: &mut dyn EvaluateSites,
        number: SiteId,
        site: &Site,
        secrets: &mut SeededRows,
    ) -> Result<(), CallError> {
        for (_, part) in site.parts.iter().zip(0..) {
            let forward = check(base, (number, site), Some(part), Direction::Forward, secrets)?;
            self.add_check(&format!("{}.{part}", number.0), &forward);
        }
        let backward = check(base, (number, site), None, Direction::Backward, secrets)?;
        self.add_check(&format!("{}.back", number.0), &backward);
        if let Some(bias) = bias(base, number, site)? {
            self.add(format!("{}.bias", number.0), Dtype::F32, vec![bias.len()], bytemuck::cast_slice(&bias));
        }
        Ok(())
    }

    fn add_check(&mut self, of: &str, SiteCheck { secret, effect, checks }: &SiteCheck) {
        let shape = |numbers: usize| vec![*checks, numbers / checks];
        self.add(format!("{of}.secret"), Dtype::U32, shape(secret.len()), bytemuck::cast_slice(secret));
        self.add(format!("{of}.effect"), Dtype::I64, shape(effect.len()), bytemuck::cast_slice(effect));
    }

    fn add(&mut self, name: String, dtype: Dtype, shape: Vec<usize>, bytes: &[u8]) {
        self.0.push(CheckTensor { name, dtype, shape, bytes: Zeroizing::new(bytes.to_vec()) });
    }
}
