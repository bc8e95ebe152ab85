from vllm.platforms.cuda import CudaPlatform

current_platform = CudaPlatform()
