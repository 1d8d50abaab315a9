//! Matrix products by cuBLASLt, with fused epilogues and a timed choice of algorithm per shape.
//!
//! cuBLASLt counts columns first, the plan rows first: a row-major matrix [r, c] is a column-major
//! one of c rows and r columns. A linear layer `y[rows, outputs] = x[rows, inputs] · wᵀ` with
//! `w[outputs, inputs]` is therefore the column-major product `y = wᵀ · x`.

use super::device::{CudaError, failed};
use super::element_type::ElementType;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::CudaStream;
use cudarc::driver::sys::{CUdeviceptr, CUevent_flags};
use std::collections::BTreeMap;
use std::ffi::c_void;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Pass of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pass {
    /// `y = x · wᵀ`
    Forward,
    /// `dx = dy · w`
    InputGradient,
    /// `dw = dyᵀ · x`
    WeightGradient,
}

/// Computation fused behind a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Epilogue {
    /// Nothing.
    None,
    /// Adds a bias to the columns of a forward pass.
    Bias,
    /// Adds a bias, keeps the sum and applies GELU (tanh form).
    BiasGelu,
    /// Multiplies an input gradient by GELU's slope at the kept sum.
    GeluGradient,
    /// The same, and sums its columns into the bias gradient of the layer before.
    GeluGradientBias,
    /// Bias gradient beside a weight gradient: the column sums of `dy`.
    BiasGradient,
}

/// Shape of a product of a linear layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Product {
    /// Pass of the layer.
    pub pass: Pass,
    /// Rows of `x` and `y`.
    pub rows: u64,
    /// Columns of `x`.
    pub inputs: u64,
    /// Columns of `y`.
    pub outputs: u64,
    /// Element type of the operands.
    pub operand: ElementType,
    /// Element type of the result.
    pub result: ElementType,
    /// True to add to the result's former value, or to `addend`.
    pub accumulate: bool,
    /// Fused computation.
    pub epilogue: Epilogue,
}

/// Addresses of a product's tensors; 0 where the epilogue has none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Operands {
    /// `x`, or `dy` for the input gradient.
    pub left: CUdeviceptr,
    /// `w`, or `dy` for the weight gradient.
    pub right: CUdeviceptr,
    /// Matrix that is added if the product accumulates.
    pub addend: CUdeviceptr,
    /// Result.
    pub result: CUdeviceptr,
    /// Bias, or its gradient.
    pub bias: CUdeviceptr,
    /// Sum before GELU.
    pub kept: CUdeviceptr,
}

/// Algorithm of a product, as cuBLASLt describes it.
#[derive(Clone, Copy, Debug)]
struct Choice {
    algorithm: sys::cublasLtMatmulAlgo_t,
    workspace: usize,
}

impl Choice {
    /// Hexadecimal words: the algorithm's eight, then the bytes of workspace.
    fn print(&self) -> String {
        let mut text = String::new();
        for word in self.algorithm.data {
            let _ = write!(text, "{word:x} ");
        }
        let _ = write!(text, "{:x}", self.workspace);
        text
    }

    fn parse(text: &str) -> Option<Self> {
        let words = text.split(' ').map(|word| u64::from_str_radix(word, 16).ok());
        let words: Vec<u64> = words.collect::<Option<_>>()?;
        let (&workspace, data) = words.split_last()?;
        let algorithm = sys::cublasLtMatmulAlgo_t { data: data.try_into().ok()? };
        Some(Self { algorithm, workspace: usize::try_from(workspace).ok()? })
    }
}

/// cuBLASLt on one stream, with a workspace of its own: equal inputs give equal bits.
pub struct Products {
    handle: sys::cublasLtHandle_t,
    stream: Arc<CudaStream>,
    workspace: CUdeviceptr,
    workspace_bytes: usize,
    chosen: BTreeMap<Product, Choice>,
    /// Choices of earlier runs by product, and the file that keeps them.
    stored: BTreeMap<String, Choice>,
    file: Option<PathBuf>,
}

// SAFETY: a cuBLASLt handle may be used from any thread; it is used from one at a time.
unsafe impl Send for Products {}

/// Algorithms that are timed for a shape.
const CANDIDATES: usize = 16;
/// Timed runs of an algorithm; the fastest counts.
const RUNS: usize = 5;
/// Alignment of operands in bytes, which every buffer of a plan has.
const ALIGNMENT: u32 = 16;

/// Descriptors of a call, destroyed with it.
struct Descriptors {
    matmul: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: created in `Products::describe`, destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.matmul);
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Products {
    /// Opens cuBLASLt for a stream.
    ///
    /// # Safety
    ///
    /// `workspace` is the address of `bytes` bytes, aligned to 256, which only this object uses as
    /// long as it lives.
    pub unsafe fn new(
        stream: &Arc<CudaStream>,
        workspace: CUdeviceptr,
        bytes: usize,
    ) -> Result<Self, CudaError> {
        let handle = result::create_handle().map_err(failed("starting cuBLASLt"))?;
        Ok(Self {
            handle,
            stream: Arc::clone(stream),
            workspace,
            workspace_bytes: bytes,
            chosen: BTreeMap::new(),
            stored: BTreeMap::new(),
            file: None,
        })
    }

    /// Version of the library.
    pub fn version() -> usize {
        // SAFETY: the call has no preconditions.
        unsafe { sys::cublasLtGetVersion() }
    }

    /// Keeps choices in a file, so that later runs compute the same bits. Lines that cannot be read
    /// are ignored: their products are timed again.
    pub fn keep_in(&mut self, file: Option<&Path>) {
        let text = file.and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default();
        let stored = text.lines().filter_map(|line| {
            let (product, choice) = line.rsplit_once(": ")?;
            Some((product.to_owned(), Choice::parse(choice)?))
        });
        // An earlier line wins, as it did in the run that timed it.
        for (product, choice) in stored {
            self.stored.entry(product).or_insert(choice);
        }
        self.file = file.map(Path::to_owned);
    }

    /// Queues a product. At the first use of a shape the library's candidates are timed.
    ///
    /// # Safety
    ///
    /// The addresses are valid for the shape's tensors until the stream has passed the product.
    pub unsafe fn run(&mut self, product: Product, at: &Operands) -> Result<(), CudaError> {
        let described = self.describe(&product, at)?;
        let choice = match self.chosen.get(&product) {
            Some(choice) => *choice,
            // SAFETY: the caller's promise.
            None => unsafe { self.choose(product, &described, at) }?,
        };
        // SAFETY: the caller's promise.
        unsafe { self.launch(&product, &described, at, &choice) }
            .map_err(failed(&format!("{product:?}")))
    }

    /// Queues a product by the library's first choice, which is not kept.
    ///
    /// # Safety
    ///
    /// As for [`Self::run`].
    pub unsafe fn run_once(&mut self, product: Product, at: &Operands) -> Result<(), CudaError> {
        let described = self.describe(&product, at)?;
        let choice = self.candidates(&product, &described, 1)?[0];
        // SAFETY: the caller's promise.
        unsafe { self.launch(&product, &described, at, &choice) }
            .map_err(failed(&format!("{product:?}")))
    }

    /// Chooses an algorithm for a shape: that of an earlier run, or the fastest.
    ///
    /// # Safety
    ///
    /// As for [`Self::run`].
    unsafe fn choose(
        &mut self,
        product: Product,
        described: &Descriptors,
        at: &Operands,
    ) -> Result<Choice, CudaError> {
        if let Some(choice) = self.stored.get(&format!("{product:?}")).copied() {
            self.chosen.insert(product, choice);
            return Ok(choice);
        }
        if product.accumulate && at.addend == at.result {
            // Timing would add to the result again and again: the choice for an overwritten result
            // serves, which the same plan has made before, or the library's first one.
            let overwritten = Product { accumulate: false, ..product };
            let choice = match self.chosen.get(&overwritten) {
                Some(choice) => *choice,
                None => match self.stored.get(&format!("{overwritten:?}")) {
                    Some(choice) => *choice,
                    None => self.candidates(&product, described, 1)?[0],
                },
            };
            self.chosen.insert(product, choice);
            return Ok(choice);
        }
        // SAFETY: the caller's promise.
        unsafe { self.tune(product, at) }?;
        let choice = self.chosen[&product];
        if let Some(file) = &self.file {
            // A file that cannot be written costs the next run its timing, no more.
            let _ = file.parent().map(fs::create_dir_all);
            if let Ok(mut file) = OpenOptions::new().create(true).append(true).open(file) {
                let _ = file.write_all(format!("{product:?}: {}\n", choice.print()).as_bytes());
            }
        }
        Ok(choice)
    }

    /// Times the library's candidates for a shape and keeps the fastest. Overwrites the result.
    ///
    /// # Safety
    ///
    /// As for [`Self::run`].
    pub unsafe fn tune(&mut self, product: Product, at: &Operands) -> Result<f64, CudaError> {
        let described = self.describe(&product, at)?;
        let mut best: Option<(f32, Choice)> = None;
        for choice in self.candidates(&product, &described, CANDIDATES)? {
            // SAFETY: the caller's promise.
            if unsafe { self.launch(&product, &described, at, &choice) }.is_err() {
                continue;
            }
            let mut fastest = f32::INFINITY;
            for _ in 0..RUNS {
                let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
                let start = self.stream.record_event(flags).map_err(failed("timing a product"))?;
                // SAFETY: the caller's promise.
                let _ = unsafe { self.launch(&product, &described, at, &choice) };
                let end = self.stream.record_event(flags).map_err(failed("timing a product"))?;
                fastest = fastest.min(start.elapsed_ms(&end).map_err(failed("timing a product"))?);
            }
            if best.as_ref().is_none_or(|(time, _)| fastest < *time) {
                best = Some((fastest, choice));
            }
        }
        let (time, choice) = best.ok_or_else(|| unsupported(&product))?;
        self.chosen.insert(product, choice);
        Ok(f64::from(time) / 1e3)
    }

    unsafe fn launch(
        &self,
        product: &Product,
        described: &Descriptors,
        at: &Operands,
        choice: &Choice,
    ) -> Result<(), result::CublasError> {
        let (alpha, beta) = (1.0f32, if product.accumulate { 1.0f32 } else { 0.0 });
        let [a, b, d] = described.layouts;
        let (first, second) = match product.pass {
            Pass::Forward | Pass::InputGradient => (at.right, at.left),
            Pass::WeightGradient => (at.left, at.right),
        };
        let addend = if product.accumulate { at.addend } else { at.result };
        // SAFETY: the descriptors live, and the caller promises the addresses.
        unsafe {
            result::matmul(
                self.handle,
                described.matmul,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                first as *const c_void,
                a,
                second as *const c_void,
                b,
                addend as *const c_void,
                d,
                at.result as *mut c_void,
                d,
                &raw const choice.algorithm,
                self.workspace as *mut c_void,
                choice.workspace,
                self.stream.cu_stream().cast(),
            )
        }
    }

    fn describe(&self, product: &Product, at: &Operands) -> Result<Descriptors, CudaError> {
        let error = || failed::<result::CublasError>("describing a product");
        let Product { rows, inputs, outputs, .. } = *product;
        // Rows and columns of A, B and D, columns first.
        let (shapes, transposed) = match product.pass {
            Pass::Forward => ([(inputs, outputs), (inputs, rows), (outputs, rows)], [true, false]),
            Pass::InputGradient => {
                ([(inputs, outputs), (outputs, rows), (inputs, rows)], [false, false])
            }
            Pass::WeightGradient => {
                ([(inputs, rows), (outputs, rows), (inputs, outputs)], [false, true])
            }
        };
        let (operand, output) = (data_type(product.operand), data_type(product.result));
        let types = [operand, operand, output];
        let mut layouts = [std::ptr::null_mut(); 3];
        for ((layout, (height, width)), ty) in layouts.iter_mut().zip(shapes).zip(types) {
            *layout =
                result::create_matrix_layout(ty, height, width, height as i64).map_err(error())?;
        }
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        let matmul =
            result::create_matmul_desc(compute, sys::cudaDataType_t::CUDA_R_32F).map_err(error())?;
        let described = Descriptors { matmul, layouts };
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        let set = |attribute, value: *const c_void, bytes| {
            // SAFETY: the descriptor lives, and the value has the attribute's size.
            unsafe { result::set_matmul_desc_attribute(matmul, attribute, value, bytes) }
                .map_err(error())
        };
        let word = |attribute, value: u32| set(attribute, (&raw const value).cast(), 4);
        let long = |attribute, value: u64| set(attribute, (&raw const value).cast(), 8);
        word(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, u32::from(transposed[0]))?;
        word(Attribute::CUBLASLT_MATMUL_DESC_TRANSB, u32::from(transposed[1]))?;
        use sys::cublasLtEpilogue_t as E;
        let epilogue = match product.epilogue {
            Epilogue::None => E::CUBLASLT_EPILOGUE_DEFAULT,
            Epilogue::Bias => E::CUBLASLT_EPILOGUE_BIAS,
            Epilogue::BiasGelu => E::CUBLASLT_EPILOGUE_GELU_AUX_BIAS,
            Epilogue::GeluGradient => E::CUBLASLT_EPILOGUE_DGELU,
            Epilogue::GeluGradientBias => E::CUBLASLT_EPILOGUE_DGELU_BGRAD,
            Epilogue::BiasGradient => E::CUBLASLT_EPILOGUE_BGRADB,
        };
        word(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue as u32)?;
        if !matches!(product.epilogue, Epilogue::None | Epilogue::GeluGradient) {
            long(Attribute::CUBLASLT_MATMUL_DESC_BIAS_POINTER, at.bias)?;
            let bias = match product.epilogue {
                Epilogue::BiasGradient => data_type(product.result),
                Epilogue::None
                | Epilogue::Bias
                | Epilogue::BiasGelu
                | Epilogue::GeluGradient
                | Epilogue::GeluGradientBias => operand,
            };
            word(Attribute::CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, bias as u32)?;
        }
        let keeps = [Epilogue::BiasGelu, Epilogue::GeluGradient, Epilogue::GeluGradientBias];
        if keeps.contains(&product.epilogue) {
            long(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, at.kept)?;
            long(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, shapes[2].0)?;
            word(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_DATA_TYPE, operand as u32)?;
        }
        Ok(described)
    }

    fn candidates(
        &self,
        product: &Product,
        described: &Descriptors,
        most: usize,
    ) -> Result<Vec<Choice>, CudaError> {
        let error = || failed::<result::CublasError>("choosing an algorithm");
        let preference = result::create_matmul_pref().map_err(error())?;
        let bytes = self.workspace_bytes;
        // SAFETY: plain numbers, for which zero is a value.
        let empty: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        let mut found = vec![empty; most];
        let mut count = 0;
        let [a, b, d] = described.layouts;
        // SAFETY: the descriptors live, and `found` has room for `most` results.
        let asked = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                (&raw const bytes).cast(),
                size_of::<usize>(),
            )
            .and_then(|()| {
                use sys::cublasLtMatmulPreferenceAttributes_t as Preference;
                let alignment = ALIGNMENT;
                for attribute in [
                    Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES,
                    Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                    Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                    Preference::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
                ] {
                    let value = (&raw const alignment).cast();
                    result::set_matmul_pref_attribute(preference, attribute, value, 4)?;
                }
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle,
                    described.matmul,
                    a,
                    b,
                    d,
                    d,
                    preference,
                    most as i32,
                    found.as_mut_ptr(),
                    &raw mut count,
                )
                .result()
            })
        };
        // SAFETY: created above.
        unsafe { result::destroy_matmul_pref(preference) }.map_err(error())?;
        asked.map_err(|_| unsupported(product))?;
        let fits = |found: &&sys::cublasLtMatmulHeuristicResult_t| found.state.result().is_ok();
        let chosen = found.iter().take(usize::try_from(count).unwrap_or(0)).filter(fits);
        let chosen: Vec<Choice> = chosen
            .map(|found| Choice { algorithm: found.algo, workspace: found.workspaceSize })
            .collect();
        if chosen.is_empty() { Err(unsupported(product)) } else { Ok(chosen) }
    }
}

impl Drop for Products {
    fn drop(&mut self) {
        // SAFETY: created in `new`, destroyed once.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

fn unsupported(product: &Product) -> CudaError {
    CudaError::Call {
        call: format!("{product:?}"),
        what: "cuBLASLt has no algorithm for it".into(),
    }
}

const fn data_type(element: ElementType) -> sys::cudaDataType_t {
    match element {
        ElementType::F32 => sys::cudaDataType_t::CUDA_R_32F,
        ElementType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        ElementType::F16 => sys::cudaDataType_t::CUDA_R_16F,
    }
}
